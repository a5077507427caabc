"""Planner of hybrids: prices stages by their best shardings and searches for the best stages.

Stages begin and end at up to :data:`MAX_UNITS` cuts that one stage can compute all sent tensors of.
Equal stages are priced once.  Not modelled: transfers that run beside operators, and the place of a
stage among the servers; a stage's GPUs are taken to be the first ones of the cluster, and a
transfer to take the slowest link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadModel, Infeasible
from nostall.parallel.module.model import Model
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.hybrid.run import CapturedStage, capture_stage
from nostall.parallel.sharding.hybrid.search import (
    HybridPlan,
    HybridStage,
    best_hybrid,
    cost_table,
)
from nostall.parallel.sharding.planners.sharding import (
    Options,
    ShardingPlan,
    plan_sharding,
    priced_plan,
)

MAX_UNITS = 8
"""Pieces of the model that stages consist of."""
_ATTEMPTS = Options(seconds=30.0)
"""Only its time limit is used: that of one entry of the table."""
Signature = tuple[object, ...]


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


@dataclass
class _Table:
    """Prices of stages on numbers of GPUs."""

    model: Model
    cluster: Cluster
    rates: DeviceRates
    samples: int
    state_factor: float
    seconds: dict[Signature, float | None] = field(default_factory=dict)

    def price(self, first: int, end: int, devices: int) -> float | None:
        """Seconds of a micro-batch; None if the stage cannot be captured or does not fit."""
        try:
            signature = (*_signature(self.model, first, end, self.samples), devices)
            if signature not in self.seconds:
                self.seconds[signature] = self._plan(first, end, devices)
        except BadModel:
            return None
        return self.seconds[signature]

    def _plan(self, first: int, end: int, devices: int) -> float | None:
        captured = capture_stage(self.model, first, end, self.samples, devices)
        try:
            return self.sharding(captured).step_s
        except Infeasible:
            return None

    def sharding(self, captured: CapturedStage) -> ShardingPlan:
        """The best sharding of a stage; raises :class:`Infeasible` if none fits into memory."""
        part = first_gpus(self.cluster, captured.devices)
        prices = Prices(captured.step.graph, ClusterMesh(part, (captured.devices,)), self.rates)
        options = Options(min(part.memory), self.state_factor, _ATTEMPTS.seconds)
        if captured.devices > 1:
            return plan_sharding(prices, options)[0]
        plan = priced_plan("one GPU", prices, replicated(prices.graph), self.state_factor)
        if not plan.fits(options.memory):
            raise Infeasible("the stage does not fit into one GPU; use more GPUs")
        return plan


def plan_hybrid(
    model: Model,
    cluster: Cluster,
    rates: DeviceRates,
    samples: int,
    micro_batches: int,
    state_factor: float,
    report: Callable[[float, str], None] = lambda fraction, text: None,
) -> Hybrid:
    """Stages and their numbers of GPUs for ``micro_batches`` of ``samples`` samples each.

    Raises :class:`Infeasible` if no plan fits into memory.
    """
    ends = stage_ends(model, samples)
    table = _Table(model, cluster, rates, samples, state_factor)
    calls = 0

    def price(first: int, end: int, devices: int) -> float | None:
        nonlocal calls
        calls += 1
        report(min(1.0, calls / (len(ends) ** 2 / 2 * len(cluster).bit_length())), "stages")
        return table.price(ends[first], ends[end], devices)

    units = len(ends) - 1
    entries = cost_table(units, len(cluster), price)
    transfer_s = [_transfer_s(model, cluster, end, samples) for end in ends]
    arguments = (entries, units, len(cluster), micro_batches, transfer_s)
    best = best_hybrid(*arguments)
    by_kind = {}
    for kind in ("sharding", "pipeline"):
        try:
            by_kind[kind] = _in_layers(best_hybrid(*arguments, (kind,)), ends)
        except Infeasible:  # this kind fits into no memory, or has not enough stages
            continue
    return Hybrid(_in_layers(best, ends), by_kind, len(entries), len(table.seconds))


def stage_ends(model: Model, samples: int) -> list[int]:
    """Layers at which stages may end, 0 first: as evenly spaced as the cuts allow."""
    possible = [c for c in range(1, len(model)) if _is_cut(model, c)]
    count = min(MAX_UNITS - 1, len(possible))
    wanted = [len(model) * (i + 1) / (count + 1) for i in range(count)]
    chosen = {min(possible, key=lambda c: abs(c - want)) for want in wanted} if possible else set()
    return [0, *sorted(chosen), len(model)]


def _is_cut(model: Model, cut: int) -> bool:
    """Whether all tensors that cross a cut belong to the layer before it."""
    return all(model.layer_of[name] == cut - 1 for name in model.crossing(cut))


def _signature(model: Model, first: int, end: int, samples: int) -> Signature:
    import torch

    segment = model.segment(first, end, samples, torch.device("cpu"))
    numbers = {node: i for i, node in enumerate(segment.function.graph.nodes)}
    return tuple(
        (
            node.op,
            "" if node.op == "placeholder" else str(node.target),
            str(getattr(node.meta.get("val"), "shape", "")),
            tuple(numbers[argument] for argument in node.all_input_nodes),
        )
        for node in numbers
    )


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


def _transfer_s(model: Model, cluster: Cluster, cut: int, samples: int) -> float:
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
