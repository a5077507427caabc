"""Loops of all operators of a graph as one kernel."""

from __future__ import annotations

from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule, build_schedule
from nostall.fusion.graph.graph import Graph


def schedule_pattern(graph: Graph) -> Schedule:
    return build_schedule(map_pattern(graph, graph.operators))
