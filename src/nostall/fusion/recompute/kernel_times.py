"""Modelled time of the kernels of a graph, packed ones included."""

from __future__ import annotations

from collections.abc import Iterable

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.cost.gpu import H200
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.packing import independent_parts, plan_packed
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.copies import Group


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
                self._seconds[group] = self._compute(group)
            except BadInput:
                self._seconds[group] = None
        return self._seconds[group]

    def _compute(self, group: Group) -> float:
        try:
            return modelled_seconds(default_plan(schedule_operators(self._graph, group)))
        except BadInput:  # no common loops: a packed kernel
            parts = independent_parts(self._graph, group)
            if len(parts) < 2:
                raise
        kernels = plan_packed([schedule_operators(self._graph, part) for part in parts])
        return sum(map(modelled_seconds, kernels)) - (len(parts) - 1) * H200.launch_s
