"""Planner of hybrids: prices stages by their best shardings and searches for the best stages.

Stages begin and end at up to :data:`MAX_UNITS` cuts that one stage can compute all sent tensors of.
Equal stages are priced once.  A stage that sends tensors on runs its forward pass twice, as
:mod:`.run` does.  Not modelled: transfers that run beside operators, and the place of a
stage among the servers; a stage's GPUs are taken to be the first ones of the cluster, and a
transfer to take the slowest link.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import numpy as np
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadModel, Infeasible
from nostall.parallel.module.model import Model
from nostall.parallel.module.segment import Segment
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import replicated, strategy_of
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
class HybridEffort:
    """Limits of a search, and a callback for its progress."""

    report: Callable[[float, str], None] = lambda fraction, text: None
    units: int = MAX_UNITS
    """Most pieces of the model that stages consist of."""
    until: float = float("inf")
    """Time of the monotonic clock at which no further stage is priced."""


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
    """Shards the stages of a plan again and returns each with its sharding."""


@dataclass
class _Table:
    """Prices of stages on numbers of GPUs."""

    model: Model
    cluster: Cluster
    rates: DeviceRates
    samples: int
    state_factor: float
    until: float = float("inf")
    """Time at which no further stage is planned."""
    seconds: dict[Signature, float | None] = field(default_factory=dict)
    is_complete: bool = True

    def price(self, first: int, end: int, devices: int) -> float | None:
        """Seconds of a micro-batch; None if the stage cannot be captured or does not fit."""
        try:
            key = (*signature(self.model, first, end, self.samples), devices)
            if key not in self.seconds:
                if monotonic() > self.until:
                    self.is_complete = False
                    return None
                self.seconds[key] = self._plan(first, end, devices)
        except BadModel:
            return None
        return self.seconds[key]

    def _plan(self, first: int, end: int, devices: int) -> float | None:
        captured = capture_stage(self.model, first, end, self.samples, devices)
        try:
            plan = self.sharding(captured)
        except Infeasible:
            return None
        return plan.step_s + (_forward_s(plan) if end < len(self.model) else 0.0)

    def planned(self, plan: HybridPlan) -> list[tuple[HybridStage, ShardingPlan]]:
        """The stages of a plan in layers, each with its sharding."""
        return [
            (s, self.sharding(capture_stage(self.model, s.first, s.end, self.samples, s.devices)))
            for s in plan.stages
        ]

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
    effort: HybridEffort | None = None,
) -> Hybrid:
    """Stages and their numbers of GPUs for ``micro_batches`` of ``samples`` samples each.

    Raises :class:`Infeasible` if no plan fits into memory.
    """
    effort = effort or HybridEffort()
    ends = stage_ends(model, effort.units)
    table = _Table(model, cluster, rates, samples, state_factor, effort.until)
    calls = 0

    def price(first: int, end: int, devices: int) -> float | None:
        nonlocal calls
        calls += 1
        effort.report(min(1.0, calls / (len(ends) ** 2 / 2 * len(cluster).bit_length())), "stages")
        return table.price(ends[first], ends[end], devices)

    count = len(ends) - 1
    entries = cost_table(count, len(cluster), price)
    transfer_s = [_transfer_s(model, cluster, end, samples) for end in ends]
    arguments = (entries, count, len(cluster), micro_batches, transfer_s)
    best = best_hybrid(*arguments)
    by_kind = {}
    for kind in ("sharding", "pipeline"):
        try:
            by_kind[kind] = _in_layers(best_hybrid(*arguments, (kind,)), ends)
        except Infeasible:  # this kind fits into no memory, or has not enough stages
            continue
    return Hybrid(
        _in_layers(best, ends), by_kind, len(entries), len(table.seconds), table.is_complete,
        table.planned,
    )  # fmt: skip


def _forward_s(plan: ShardingPlan) -> float:
    """Seconds of the forward pass of a sharding, without overlap."""
    graph, prices = plan.prices.graph, plan.prices
    seconds = sum(
        priced.seconds
        for edge, priced in plan.cost.redistributions
        if graph.operators[edge.consumer].is_forward
        and graph.operators[edge.consumer].kind != "parameter"
    )
    for number, operator in enumerate(graph.operators):
        if operator.is_forward:
            own = prices.operator_s(operator, strategy_of(graph, plan.assignment, number))
            seconds += own or 0.0
    return seconds


def stage_ends(model: Model, units: int = MAX_UNITS) -> list[int]:
    """Layers at which stages may end, 0 first: as evenly spaced as the cuts allow."""
    possible = [c for c in range(1, len(model)) if _is_cut(model, c)]
    count = min(units - 1, len(possible))
    wanted = [len(model) * (i + 1) / (count + 1) for i in range(count)]
    chosen = {min(possible, key=lambda c: abs(c - want)) for want in wanted} if possible else set()
    return [0, *sorted(chosen), len(model)]


def _is_cut(model: Model, cut: int) -> bool:
    """Whether no parameter has layers on both sides, and stages send only what they compute."""
    before = {id(p) for p in model.stage_parameters(0, cut)}
    is_shared = any(id(p) in before for p in model.stage_parameters(cut, len(model)))
    return not is_shared and sends_its_own(model, cut)


def sends_its_own(model: Model, cut: int) -> bool:
    """Whether all tensors that cross a cut belong to the layer before it."""
    return all(model.layer_of[name] == cut - 1 for name in model.crossing(cut))


def signature(model: Model, first: int, end: int, samples: int) -> Signature:
    """Key of a stage in the price table.

    Two stages with equal keys run the same operators on the same shapes and dtypes, so that one
    price holds for both.
    """
    import torch
    from torch.fx.node import map_arg

    segment = model.segment(first, end, samples, torch.device("cpu"))
    nodes = list(segment.function.graph.nodes)
    numbers = {node: f"node {i}" for i, node in enumerate(nodes)}
    given = _given_tensors(model, segment, samples)
    operators = [
        (
            str(node.target),
            repr(map_arg((node.args, node.kwargs), lambda n: numbers[n])),
            *(_shape_and_dtype(value) for value in tree_leaves(node.meta.get("val"))),
        )
        for node in nodes
        if node.op != "placeholder"
    ]
    return (len(segment.sent), *given, *operators)


def _given_tensors(model: Model, segment: Segment, samples: int) -> list[Signature]:
    """Role, shape and dtype of a segment's arguments."""
    batch = tree_leaves(model.job.example_batch(samples))
    return [
        *((_role(tensor), *_shape_and_dtype(tensor)) for tensor in segment.own),
        *(("input", *_shape_and_dtype(batch[i])) for i in segment.leaves),
        *(
            ("received", str(model.shape(name, samples)), str(model.dtype(name)))
            for name in segment.used
        ),
    ]


def _role(own: Any) -> str:
    if not isinstance(own, Parameter):
        return "buffer"
    return "parameter" if own.requires_grad else "frozen parameter"


def _shape_and_dtype(value: Any) -> Signature:
    """Both as text; a value that is no tensor stands for itself."""
    if not hasattr(value, "dtype"):
        return (repr(value),)
    return str(tuple(value.shape)), str(value.dtype)


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
