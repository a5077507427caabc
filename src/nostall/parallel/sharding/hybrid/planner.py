"""Planner of hybrids: prices stages by their best shardings and searches for the best stages.

Stages begin and end at up to :data:`MAX_UNITS` cuts that one stage can compute all sent tensors of.
Equal stages are priced once.  Every stage but the last runs its forward pass twice: once to send
its results, once before its backward pass.  What a stage sends is made whole.  Memory counts what a
stage receives for each micro-batch, of which 1F1B keeps fewer.  Not modelled: transfers that run
beside operators, and the place of a stage among the servers; a stage's GPUs are taken to be the
first ones of the cluster, and a transfer to take the slowest link.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from nostall.core.compile_clock import planning_clock
from nostall.core.text.plurals import pluralize
from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadModel, Infeasible
from nostall.parallel.module.model import Model
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, CollectiveCost
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.cost.timeline import timeline
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.hybrid.run import CapturedStage, capture_stage
from nostall.parallel.sharding.hybrid.search import (
    KINDS,
    HybridPlan,
    HybridStage,
    Key,
    best_hybrid,
    cost_table,
    stage_sizes,
)
from nostall.parallel.sharding.hybrid.signature import Signature, signature
from nostall.parallel.sharding.hybrid.stage_job import RECEIVED, sent_tensors
from nostall.parallel.sharding.placements import Collective
from nostall.parallel.sharding.planners.sharding import (
    Options,
    ShardingPlan,
    plan_sharding,
    priced_plan,
)

MAX_UNITS = 8
"""Pieces of the model that stages consist of."""
ENTRY_SECONDS = 30.0
"""Longest search for the sharding of one entry of the table."""


@dataclass(frozen=True)
class HybridEffort:
    """Limits of a search, and a callback for its progress."""

    report: Callable[[float, str], None] = lambda fraction, text: None
    units: int = MAX_UNITS
    """Most pieces of the model that stages consist of."""
    until: float = float("inf")
    """Time of :func:`planning_clock` at which no further stage is priced."""
    ends: Sequence[int] = ()
    """Layers at which stages may end, 0 first; chosen by ``units`` if empty."""


Measured = Mapping[int, Mapping[tuple[Collective, int], CollectiveCost]]
"""Measured costs of collectives by the number of a stage's GPUs."""


@dataclass(frozen=True)
class Hybrid:
    """The best plan, the best of each kind, and the size of the table."""

    best: HybridPlan
    """Its stages have numbers of layers."""
    by_kind: dict[str, HybridPlan]
    """Best plans of the kinds ``sharding`` and ``pipeline`` under the same model."""
    entries: int
    priced: int
    """Entries whose sharding was planned; all others equal one of these."""
    is_complete: bool
    """Whether all stages were priced within the time limit."""
    planned: Callable[[HybridPlan], list[tuple[HybridStage, ShardingPlan]]]
    """The stages of a plan, each with the sharding that was priced."""
    best_with: Callable[[Callable[[Key], bool]], HybridPlan | None]
    """The best plan of stages (first layer, end, GPUs) that fulfil a condition, or None."""
    why_one_stage: str = ""
    """Why no plan of several stages is possible; empty if one is."""


@dataclass
class _Table:
    """Prices of stages on numbers of GPUs."""

    model: Model
    cluster: Cluster
    rates: DeviceRates
    samples: int
    micro_batches: int
    state_factor: float
    until: float = float("inf")
    """Time at which no further stage is planned."""
    measured: Measured = field(default_factory=dict)
    shardings: dict[Signature, ShardingPlan | None] = field(default_factory=dict)
    """Best shardings by the key of a stage and its GPUs; None if none fits into memory."""
    refusals: dict[Key, str] = field(default_factory=dict)
    """Why entries are missing, by first layer, end and GPUs, in the order of the search."""
    is_complete: bool = True

    def price(self, first: int, end: int, devices: int) -> float | None:
        """Seconds of a micro-batch; None if the stage cannot be captured or does not fit."""
        try:
            key = self._key(first, end, devices)
            if key not in self.shardings:
                if planning_clock() > self.until and self.shardings:  # the first one is needed
                    self.is_complete = False
                    return None
                self.shardings[key] = self._plan(first, end, devices)
        except BadModel as error:
            self.refusals[first, end, devices] = str(error)
            return None
        plan = self.shardings[key]
        if plan is None:
            return None
        return stage_s(self.model, plan, first, end, self.samples)

    def _key(self, first: int, end: int, devices: int) -> Signature:
        return (*signature(self.model, first, end, self.samples), devices)

    def _plan(self, first: int, end: int, devices: int) -> ShardingPlan | None:
        captured = capture_stage(self.model, first, end, self.samples, devices)
        try:
            return self._sharding(captured)
        except Infeasible as error:
            where = f"layers {first} to {end - 1} on {pluralize(devices, 'GPU')}"
            self.refusals[first, end, devices] = f"{where}: {error}"
            return None

    def planned(self, plan: HybridPlan) -> list[tuple[HybridStage, ShardingPlan]]:
        """The stages of a plan in layers, each with the sharding that was priced."""
        return [(stage, self._priced(stage)) for stage in plan.stages]

    def _priced(self, stage: HybridStage) -> ShardingPlan:
        """The sharding of the table for a stage's own graph, which may equal that of another."""
        captured = capture_stage(self.model, stage.first, stage.end, self.samples, stage.devices)
        found = self.shardings[self._key(stage.first, stage.end, stage.devices)]
        assert found is not None  # the stage is part of a plan
        prices = replace(found.prices, graph=captured.step.graph)
        own = priced_plan(found.name, prices, found.assignment, self.state_factor)
        return replace(found, prices=prices, cost=own.cost, times=own.times)

    def _sharding(self, captured: CapturedStage) -> ShardingPlan:
        """The best sharding of a stage; raises :class:`Infeasible` if none fits into memory."""
        part = first_gpus(self.cluster, captured.devices)
        mesh = ClusterMesh(part, (captured.devices,), self.measured.get(captured.devices, {}))
        prices = Prices(captured.step.graph, mesh, self.rates)
        kept = (self.micro_batches - 1) * captured.stage.given_bytes
        limit = min(part.memory) - kept
        if limit <= 0:
            raise Infeasible(
                f"what a stage receives for {self.micro_batches} micro-batches takes "
                f"{kept / 2**30:.3g} GiB and a GPU has {min(part.memory) / 2**30:.3g} GiB; use a "
                "smaller --global-batch"
            )
        seconds = max(1.0, min(ENTRY_SECONDS, self.until - planning_clock()))
        if captured.devices > 1:
            options = Options(limit, self.state_factor, seconds, 1 / self.micro_batches)
            plan = plan_sharding(prices, options)[0]
        else:
            plan = priced_plan("one GPU", prices, replicated(prices.graph), self.state_factor)
        if not plan.fits(limit):
            raise Infeasible(
                f"they need {(plan.memory.peak + kept) / 2**30:.3g} GiB, modelled, and a GPU has "
                f"{min(part.memory) / 2**30:.3g} GiB; use more GPUs"
            )
        return replace(plan, memory=replace(plan.memory, tensors=plan.memory.tensors + kept))


def plan_hybrid(
    model: Model,
    cluster: Cluster,
    rates: DeviceRates,
    samples: int,
    micro_batches: int,
    state_factor: float,
    effort: HybridEffort | None = None,
    measured: Measured | None = None,
) -> Hybrid:
    """Stages and their numbers of GPUs for ``micro_batches`` of ``samples`` samples each.

    ``measured`` replaces the costs of collectives that follow from the cluster's links.  Raises
    :class:`Infeasible` if no plan fits into memory.
    """
    effort = effort or HybridEffort()
    ends = [*(effort.ends or stage_ends(model, effort.units))]
    table = _Table(
        model, cluster, rates, samples, micro_batches, state_factor, effort.until, measured or {}
    )
    calls = 0

    def price(first: int, end: int, devices: int) -> float | None:
        nonlocal calls
        calls += 1
        effort.report(min(1.0, calls / (len(ends) ** 2 / 2 * len(cluster).bit_length())), "stages")
        return table.price(ends[first], ends[end], devices)

    count = len(ends) - 1
    entries = cost_table(count, len(cluster), price)
    transfers_s = [transfer_s(model, cluster, end, samples) for end in ends]

    def best(prices: Mapping[Key, float], *kinds: str) -> HybridPlan | None:
        numbers = (count, len(cluster), micro_batches, transfers_s)
        try:
            found = best_hybrid(prices, *numbers, kinds or KINDS)
        except Infeasible:  # none fits into memory, or has enough stages
            return None
        return _in_layers(found, ends)

    def best_with(is_allowed: Callable[[Key], bool]) -> HybridPlan | None:
        found = ((key, (ends[key[0]], ends[key[1]], key[2])) for key in entries)
        return best({key: entries[key] for key, in_layers in found if is_allowed(in_layers)})

    parts = {key: seconds for key, seconds in entries.items() if key[:2] != (0, count)}
    why_one_stage = "" if best(parts) is not None else _why_one_stage(table, ends)
    fastest = best(entries)
    if fastest is None:
        whole = table.refusals.get((0, len(model), len(cluster)))
        raise Infeasible(
            f"no plan of {pluralize(micro_batches, 'micro-batch')} was found: {why_one_stage}"
            + (f"; as one stage, {whole}" if whole and whole != why_one_stage else "")
        )
    pure = {kind: plan for kind in ("sharding", "pipeline") if (plan := best(entries, kind))}
    return Hybrid(
        fastest, pure, len(entries), len(table.shardings), table.is_complete, table.planned,
        best_with, why_one_stage,
    )  # fmt: skip


def stage_s(model: Model, plan: ShardingPlan, first: int, end: int, samples: int) -> float:
    """Seconds of a micro-batch: the step, and the first forward pass of all but the last stage.

    Gradients of received tensors, and sent tensors, become whole at the end.
    """
    graph = plan.prices.graph
    received = [
        operator.outputs[0]
        for operator in graph.operators
        if operator.kind == "parameter" and operator.target.startswith(RECEIVED)
    ]
    step_s = timeline(plan.prices, plan.assignment, received).step_s
    if end == len(model):
        return step_s
    segment = model.segment(first, end, samples, torch.device("cpu"))
    sent = sent_tensors(graph, len(segment.leaves), segment.computed)
    forward = timeline(plan.prices, plan.assignment, [*sent.values()], forward_only=True)
    return step_s + forward.step_s


def _why_one_stage(table: _Table, ends: Sequence[int]) -> str:
    """Why no plan of at least two stages is possible."""
    model, devices = table.model, len(table.cluster)
    if len(model) == 1:
        return "the model has one layer"
    if len(ends) == 2:
        cuts = range(1, len(model))
        tied = sum(_shares_parameters(model, cut) for cut in cuts)
        return (
            f"no cut between layers is possible: at {tied} of {len(cuts)}, layers on both sides "
            "share a parameter, and at the others a stage would pass on a tensor that it does not "
            "compute"
        )
    if not table.is_complete:
        return "the time limit ended the search before its stages were priced"
    refused = [why for (first, end, _), why in table.refusals.items() if end - first < len(model)]
    if refused:
        return refused[0]
    sizes = ", ".join(map(str, stage_sizes(devices)))
    return f"{len(ends) - 1} pieces on {sizes} GPUs each do not use all {devices} GPUs"


def stage_ends(model: Model, units: int = MAX_UNITS) -> list[int]:
    """Layers at which stages may end, 0 first: as evenly spaced as the cuts allow."""
    possible = [c for c in range(1, len(model)) if _is_cut(model, c)]
    count = min(units - 1, len(possible))
    wanted = [len(model) * (i + 1) / (count + 1) for i in range(count)]
    chosen = {min(possible, key=lambda c: abs(c - want)) for want in wanted} if possible else set()
    return [0, *sorted(chosen), len(model)]


def _is_cut(model: Model, cut: int) -> bool:
    """Whether no parameter has layers on both sides, and stages send only what they compute."""
    return not _shares_parameters(model, cut) and sends_its_own(model, cut)


def _shares_parameters(model: Model, cut: int) -> bool:
    """Whether layers on both sides of a cut read one parameter."""
    before = {id(p) for p in model.stage_parameters(0, cut)}
    return any(id(p) in before for p in model.stage_parameters(cut, len(model)))


def sends_its_own(model: Model, cut: int) -> bool:
    """Whether all tensors that cross a cut belong to the layer before it."""
    return all(model.layer_of[name] == cut - 1 for name in model.crossing(cut))


def first_gpus(cluster: Cluster, count: int) -> Cluster:
    """The cluster of the first GPUs."""
    part = slice(count)
    return replace(
        cluster,
        memory=cluster.memory[part],
        server=cluster.server[part],
        latency=cluster.latency[part, part],
        bandwidth=cluster.bandwidth[part, part],
        allreduce_bandwidth=cluster.allreduce_bandwidth[part, part],
        text="",
    )


def transfer_s(model: Model, cluster: Cluster, cut: int, samples: int) -> float:
    """Seconds of a micro-batch's tensors over a cut and of their gradients back."""
    if cut in (0, len(model)) or len(cluster) == 1:
        return 0.0
    pairs = ~np.eye(len(cluster), dtype=bool)
    total = 0.0
    for name in model.crossing(cut):
        size = float(np.prod(model.shape(name, samples))) * model.dtype(name).itemsize
        ways = 2 if model.has_gradient(name) else 1
        slowest = float(cluster.bandwidth[pairs].min())
        total += ways * (float(cluster.latency[pairs].max()) + size / slowest)
    return total


def _in_layers(plan: HybridPlan, ends: list[int]) -> HybridPlan:
    """The plan with numbers of layers in place of those of units."""
    return replace(
        plan,
        stages=tuple(
            HybridStage(ends[s.first], ends[s.end], s.devices, s.seconds) for s in plan.stages
        ),
    )
