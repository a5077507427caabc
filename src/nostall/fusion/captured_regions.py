"""Regions of a captured graph."""

from __future__ import annotations

from nostall.fusion.capture import CapturedGraph
from nostall.fusion.graph.regions import Region, find_regions
from nostall.fusion.recompute.partial_reads import views_of_parts


def captured_regions(captured: CapturedGraph) -> tuple[Region, ...]:
    """The regions of a graph; views that have a node in the FX graph may be inputs of regions.

    They are if a kernel can read their parts only so (:func:`.views_of_parts`).
    """
    graph = captured.graph
    return find_regions(graph, input_views=views_of_parts(graph) & captured.origins.keys())
