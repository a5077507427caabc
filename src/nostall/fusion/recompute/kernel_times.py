"""Modelled time of the kernels of a graph, packed ones included."""

from __future__ import annotations

from collections.abc import Iterable

from nostall.core.errors import BadInput
from nostall.fusion.explore.kernel_splitting import Group, kernel_seconds
from nostall.fusion.graph.graph import Graph


class KernelTimes:
    """Modelled seconds of kernels with their default plans, each computed once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._seconds: dict[Group, float | None] = {}

    def total(self, groups: Iterable[Group]) -> float | None:
        """Modelled seconds of all kernels; None if one of them has no plan."""
        seconds = [self._of(group) for group in groups]
        known = [each for each in seconds if each is not None]
        return sum(known) if len(known) == len(seconds) else None

    def _of(self, group: Group) -> float | None:
        if group not in self._seconds:
            try:
                self._seconds[group] = kernel_seconds(self._graph, group)
            except BadInput:
                self._seconds[group] = None
        return self._seconds[group]
