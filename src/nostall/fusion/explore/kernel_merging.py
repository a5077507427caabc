"""Merging of kernels if one kernel takes less modelled time than two that exchange a tensor.

The explorer's model knows the bytes and launches that a kernel saves, but not the schemes of the
code generator.  For example, it puts the reductions of one long row and the operators that use them
into two kernels.  The scheme ``split`` computes both in two launches instead of three.  So adjacent
kernels are compared by the cost model of schedules, the pair that exchanges the most bytes first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.explore.kernel_splitting import Group
from nostall.fusion.graph.graph import Graph

MAX_TRIALS = 32
"""Pairs of kernels of one graph that are compared; planning a kernel takes some 50 ms."""


def merge_kernels(graph: Graph, groups: Iterable[Group]) -> list[Group]:
    """The same operators, with adjacent kernels merged where that takes less modelled time."""
    kernels = [tuple(sorted(group)) for group in groups]
    times = _KernelTimes(graph)
    refused: set[frozenset[Group]] = set()
    trials = 0
    while trials < MAX_TRIALS:
        pair = next((p for p in _adjacent(graph, kernels) if frozenset(p) not in refused), None)
        if pair is None:
            break
        trials += 1
        rest = [kernel for kernel in kernels if kernel not in pair]
        merged = tuple(sorted({*pair[0], *pair[1]}))
        if graph.is_acyclic([*rest, merged]) and times.is_faster(merged, pair):
            kernels = [*rest, merged]
        else:
            refused.add(frozenset(pair))
    return kernels


def _adjacent(graph: Graph, kernels: list[Group]) -> Iterator[tuple[Group, Group]]:
    """Pairs of kernels of which one reads what the other writes, the most bytes first."""
    owner = {index: kernel for kernel in kernels for index in kernel}
    exchanged: dict[tuple[Group, Group], int] = {}
    for index, kernel in owner.items():
        for reader in {owner[i] for i in graph.consumers[index] if i in owner} - {kernel}:
            pair = (kernel, reader)
            exchanged[pair] = exchanged.get(pair, 0) + graph[index].bytes
    yield from sorted(exchanged, key=lambda pair: (-exchanged[pair], pair))


class _KernelTimes:
    """Modelled seconds of the kernels of a graph with their default plans, each computed once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._seconds: dict[Group, float | None] = {}

    def is_faster(self, merged: Group, parts: Iterable[Group]) -> bool:
        """Whether a kernel is faster than its parts; False if one of them has no plan."""
        seconds = [self._of(part) for part in parts]
        if None in seconds or (whole := self._of(merged)) is None:
            return False
        return whole < sum(s for s in seconds if s is not None)

    def _of(self, group: Group) -> float | None:
        if group not in self._seconds:
            try:
                plan = default_plan(schedule_operators(self._graph, group))
                self._seconds[group] = modelled_seconds(plan)
            except BadInput:  # no common loops (a packed kernel), or no legal plan
                self._seconds[group] = None
        return self._seconds[group]
