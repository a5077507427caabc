"""Modelled seconds of operators and redistributions, and of a whole plan.

An operator takes the larger of its arithmetic at the GPU's FLOP/s and, of its local tensors, what
its kernel moves at the memory's bytes/s (:mod:`.kernels`).  Collectives do not overlap with
operators here, and each redistribution has its own; :mod:`.timeline` models overlap and buckets of
gradients.  The step of the optimiser is apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.kernels import KernelShare, kernel_shares
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import (
    Assignment,
    Edge,
    Operator,
    ShardingGraph,
    TensorInfo,
    input_placements,
    output_placements,
    strategy_of,
)
from nostall.parallel.sharding.placements import (
    COLLECTIVES,
    Placements,
    Step,
    Strategy,
    local_shape,
    redistribution,
    shard,
)


@dataclass(frozen=True, slots=True)
class PricedStep:
    """One step of a redistribution with its size and time."""

    step: Step
    size: float
    """Bytes of the largest local tensor, before or after the step."""
    seconds: float


@dataclass(eq=False)
class Prices:
    """Prices of the operators and redistributions of one graph on one cluster."""

    graph: ShardingGraph
    mesh: ClusterMesh
    rates: DeviceRates
    _redistributions: dict[
        tuple[TensorInfo, Placements, Placements], tuple[PricedStep, ...] | None
    ] = field(default_factory=dict, repr=False)
    _local_bytes: dict[tuple[tuple[int, ...], int, Placements], float | None] = field(
        default_factory=dict, repr=False
    )

    @cached_property
    def _shares(self) -> dict[int, KernelShare]:
        own = zip(self.graph.operators, kernel_shares(self.graph), strict=True)
        return {id(operator): share for operator, share in own}

    def operator_s(self, operator: Operator, strategies: Sequence[Strategy]) -> float | None:
        """Seconds of an operator; ``strategies`` has one for each mesh dimension.

        None if a tensor cannot be sharded evenly on all mesh dimensions together.
        """
        share, moved = self._shares[id(operator)], 0.0
        for tensors, placed, counted in (
            (operator.inputs, [s.inputs for s in strategies], share.reads - operator.unread),
            (operator.outputs, [s.outputs for s in strategies], share.writes),
        ):
            for position, tensor in enumerate(tensors):
                placements = tuple(p[position] for p in placed)
                size = self.local_bytes(self.graph.tensors[tensor], placements)
                if size is None:
                    return None
                moved += size if position in counted else 0.0
        if operator.kind != "operation" or not operator.moves_memory:
            return 0.0
        flops = operator.flops
        for strategy, devices in zip(strategies, self.mesh.shape, strict=True):
            if strategy.splits_work:
                flops /= devices
        dtype = self.graph.tensors[operator.inputs[0]].dtype if operator.inputs else ""
        busy = max(self.rates.compute_s(flops, dtype), moved / self.rates.memory)
        return max(busy, self.rates.kernel_s) + (self.rates.start_s if share.starts else 0.0)

    def operators_s(self, assignment: Assignment, forward: bool | None = None) -> float:
        """Seconds of all operators; infinite if a tensor cannot be sharded so.

        ``forward`` selects the operators of the forward pass, or all others.
        """
        seconds = 0.0
        for number, operator in enumerate(self.graph.operators):
            if forward is None or operator.is_forward is forward:
                own = self.operator_s(operator, strategy_of(self.graph, assignment, number))
                seconds += math.inf if own is None else own
        return seconds

    def redistribution(
        self, info: TensorInfo, source: Placements, target: Placements
    ) -> tuple[PricedStep, ...] | None:
        """Steps of a redistribution with their prices; None if it is not possible."""
        key = (info, source, target)
        if key not in self._redistributions:
            self._redistributions[key] = self._price(info, source, target)
        return self._redistributions[key]

    def bucket(self, sizes: Sequence[float], step: Step) -> PricedStep:
        """One collective for several gradients, whose local bytes are ``sizes``, with its copy."""
        size = sum(sizes)
        seconds = self.mesh.seconds(step.kind, step.mesh_dim, size)  # type: ignore[arg-type]
        return PricedStep(step, size, seconds + 2 * size / self.rates.memory)

    def local_bytes(self, info: TensorInfo, placements: Placements) -> float | None:
        """Bytes of a tensor on one device; None if it cannot be sharded evenly."""
        key = (info.shape, info.itemsize, placements)
        if key not in self._local_bytes:
            shape = local_shape(info.shape, placements, self.mesh.shape)
            size = None if shape is None else float(math.prod(shape) * info.itemsize)
            self._local_bytes[key] = size
        return self._local_bytes[key]

    def _price(
        self, info: TensorInfo, source: Placements, target: Placements
    ) -> tuple[PricedStep, ...] | None:
        steps = redistribution(source, target)
        if steps is None:
            return None
        current, priced = list(source), []
        before = self.local_bytes(info, source)
        for step in steps:
            current[step.mesh_dim] = step.target
            after = self.local_bytes(info, tuple(current))
            if before is None or after is None:
                return None
            priced.append(self._priced_step(step, before, after))
            before = after
        return tuple(priced)

    def _priced_step(self, step: Step, before: float, after: float) -> PricedStep:
        size, rates = max(before, after), self.rates
        if step.kind in COLLECTIVES:
            seconds = self.mesh.seconds(step.kind, step.mesh_dim, size)
            return PricedStep(step, size, seconds + _copied(step, before, after) / rates.memory)
        copied = 2 * after / rates.memory  # reads and writes the local tensor
        return PricedStep(step, size, max(copied, rates.kernel_s))


def _copied(step: Step, before: float, after: float) -> float:
    """Bytes that a device reads and writes beside a collective, whose buffers are contiguous.

    An all-reduce works on a copy of the tensor.  Parts along the first dimension are contiguous;
    others are copied.
    """
    first = shard(0)
    sent = 0.0 if step.target == first else 2 * before
    received = 0.0 if step.source == first else 2 * after
    copied = {
        "all-reduce": 2 * before,
        "all-gather": received,
        "reduce-scatter": sent,
        "all-to-all": sent + received,
    }
    return copied[step.kind]


@dataclass(frozen=True, eq=False)
class StepCost:
    """Modelled cost of one training step under an assignment."""

    operators_s: float
    """Seconds of all operators."""
    redistributions: tuple[tuple[Edge, PricedStep], ...]
    """All steps of redistributions with their tensor's edge, in the order of the consumers."""

    @property
    def collectives(self) -> tuple[tuple[Edge, PricedStep], ...]:
        """The redistributions' steps that send something."""
        return tuple(
            (edge, priced)
            for edge, priced in self.redistributions
            if priced.step.kind in COLLECTIVES
        )

    @property
    def collectives_s(self) -> float:
        """Seconds of all collectives."""
        return sum(priced.seconds for _, priced in self.collectives)

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.operators_s + sum(priced.seconds for _, priced in self.redistributions)


def step_cost(prices: Prices, assignment: Assignment) -> StepCost | None:
    """Modelled cost of an assignment; None if it is not possible on this mesh."""
    graph = prices.graph
    operators_s = prices.operators_s(assignment)
    if math.isinf(operators_s):
        return None
    redistributions = []
    for edge in graph.edges:
        steps = prices.redistribution(
            graph.tensors[edge.tensor],
            output_placements(graph, assignment, edge.tensor),
            input_placements(graph, assignment, edge),
        )
        if steps is None:
            return None
        redistributions += [(edge, priced) for priced in steps]
    return StepCost(operators_s, tuple(redistributions))
