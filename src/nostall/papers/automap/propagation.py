"""Propagation of partition decisions through a forward graph without redistributions (section 4).

Every operator has a set of strategies that are still possible.  An edge allows two strategies if
their placements are equal or change between partial and replicated; no shard is redistributed.  A
decision on a dimension restricts the strategies of one tensor; arc
consistency (AC-3) removes all others that have no partner left.  An empty set is a conflict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.graph import ShardingGraph
from nostall.parallel.sharding.placements import PARTIAL_MEAN, PARTIAL_SUM, REPLICATED, shard

Sets = NDArray[np.int64]
"""For each operator, the strategies that are possible, as bits."""
_WITHOUT_RESHARDING = {
    (PARTIAL_SUM, REPLICATED),
    (PARTIAL_MEAN, REPLICATED),
    (REPLICATED, PARTIAL_SUM),
}
"""Pairs of different placements, written and read, that need no redistribution of shards.  XLA
adds an all-reduce after a contraction; the last pair is a bias that addmm adds to partial sums."""
MAX_STRATEGIES = 62
"""Strategies that the bits of a set can number."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of a parameter or of a tensor of the batch."""

    operator: int
    dim: int


class Propagation:
    """Forward graph of a step on one mesh dimension.

    Raises :class:`BadPlan` for a mesh of several dimensions.
    """

    def __init__(self, graph: ShardingGraph) -> None:
        if len(graph.mesh) != 1:
            raise BadPlan(
                f"Auto-MAP slices tensors over all GPUs, and the mesh has {len(graph.mesh)} "
                "dimensions; give --mesh with one number"
            )
        self.graph = graph
        variable = _depend_on_variables(graph)
        edges = [
            edge
            for edge in graph.edges
            if graph.operators[edge.consumer].is_forward
            and graph.operators[edge.consumer].kind != "parameter"
            and edge.producer in variable
        ]
        count = len(graph.operators)
        self._sets = np.zeros(count, dtype=np.int64)
        for number, operator in enumerate(graph.operators):
            self._sets[number] = (1 << min(len(operator.strategies[0]), MAX_STRATEGIES)) - 1
        self._ends = np.array([(e.producer, e.consumer) for e in edges], dtype=np.int64)
        self._partners = np.zeros((len(edges), 2, MAX_STRATEGIES), dtype=np.int64)
        for number, edge in enumerate(edges):
            sources = [
                s.outputs[edge.output] for s in graph.operators[edge.producer].strategies[0]
            ][:MAX_STRATEGIES]
            targets = [
                s.inputs[edge.position] for s in graph.operators[edge.consumer].strategies[0]
            ][:MAX_STRATEGIES]
            for a, source in enumerate(sources):
                for b, target in enumerate(targets):
                    if source == target or (source, target) in _WITHOUT_RESHARDING:
                        self._partners[number, 0, a] |= 1 << b
                        self._partners[number, 1, b] |= 1 << a
        near: list[list[int]] = [[] for _ in range(count)]
        for number, edge in enumerate(edges):
            near[edge.producer].append(number)
            near[edge.consumer].append(number)
        self._first = np.cumsum([0, *map(len, near)])
        self._near = np.array([edge for own in near for edge in own], dtype=np.int64)

    def dimensions(self, kind: str) -> list[Dimension]:
        """Dimensions of all parameters, or of all tensors of the batch, that shard evenly."""
        return [
            Dimension(number, dim)
            for number, operator in enumerate(self.graph.operators)
            if operator.kind == kind
            for dim in range(len(self.graph.tensors[operator.outputs[0]].shape))
            if self._bit(Dimension(number, dim))
        ]

    def start(self, replicated_kinds: Iterable[str]) -> Sets | None:
        """The sets before any decision, with all tensors of some kinds replicated."""
        sets = self._sets.copy()
        for number, operator in enumerate(self.graph.operators):
            if operator.kind in replicated_kinds:
                sets[number] &= self._bits_of(number, REPLICATED)
        return sets if self._propagate(sets, range(len(sets))) else None

    def decide(self, sets: Sets, dimension: Dimension, *, partition: bool) -> Sets | None:
        """The sets after a decision and all that follow from it; None for a conflict."""
        result = sets.copy()
        bit = self._bit(dimension)
        result[dimension.operator] &= bit if partition else ~bit
        return result if self._propagate(result, [dimension.operator]) else None

    def decision(self, sets: Sets, dimension: Dimension) -> int:
        """1 if a dimension is partitioned, 0 if it is replicated, -1 if it is undecided."""
        own, bit = int(sets[dimension.operator]), self._bit(dimension)
        if own & bit == 0:
            return 0
        return 1 if own == bit else -1

    def placement(self, sets: Sets, operator: int) -> str:
        """The placement of a tensor whose dimensions are all decided; replicated otherwise."""
        (strategies,) = self.graph.operators[operator].strategies
        possible = [s.outputs[0] for i, s in enumerate(strategies) if int(sets[operator]) >> i & 1]
        return possible[0] if len(possible) == 1 else REPLICATED

    def _bit(self, dimension: Dimension) -> int:
        return self._bits_of(dimension.operator, shard(dimension.dim))

    def _bits_of(self, operator: int, placement: str) -> int:
        (strategies,) = self.graph.operators[operator].strategies
        return sum(1 << i for i, s in enumerate(strategies) if s.outputs[0] == placement)

    def _propagate(self, sets: Sets, changed: Sequence[int]) -> bool:
        """Restrict ``sets`` in place; False for a conflict."""
        if not sets[list(changed)].all():
            return False
        start = np.array(changed, dtype=np.int64)
        return bool(_restrict(sets, start, self._ends, self._partners, self._first, self._near))


def _depend_on_variables(graph: ShardingGraph) -> set[int]:
    """Operators that depend on a parameter or the batch; all others compute constants.

    Constants restrict nothing: every GPU has them whole and takes the shard it needs.
    """
    found: set[int] = set()
    for number, operator in enumerate(graph.operators):
        is_source = operator.kind in ("parameter", "input")
        if is_source or any(graph.producers[t] in found for t in operator.inputs):
            found.add(number)
    return found


@njit(cache=True)  # type: ignore[untyped-decorator]
def _restrict(
    sets: Sets,
    changed: NDArray[np.int64],
    ends: NDArray[np.int64],
    partners: NDArray[np.int64],
    first: NDArray[np.int64],
    near: NDArray[np.int64],
) -> bool:
    """AC-3 from the operators ``changed``; False if a set becomes empty."""
    count = len(sets)
    queue = np.empty(count + 1, dtype=np.int64)
    waiting = np.zeros(count, dtype=np.bool_)
    head, tail = 0, 0
    for operator in changed:
        queue[tail] = operator
        waiting[operator] = True
        tail += 1
    while head != tail:
        current = queue[head]
        head = (head + 1) % (count + 1)
        waiting[current] = False
        for place in range(first[current], first[current + 1]):
            edge = near[place]
            side = 0 if ends[edge, 0] == current else 1
            other = ends[edge, 1 - side]
            supported = np.int64(0)
            own = sets[current]
            for number in range(partners.shape[2]):
                if own >> number & 1:
                    supported |= partners[edge, side, number]
            restricted = sets[other] & supported
            if restricted == 0:
                return False
            if restricted != sets[other]:
                sets[other] = restricted
                if not waiting[other]:
                    waiting[other] = True
                    queue[tail] = other
                    tail = (tail + 1) % (count + 1)
    return True
