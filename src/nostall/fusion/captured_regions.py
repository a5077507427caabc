"""Regions of a captured graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nostall.fusion.capture import CapturedGraph
from nostall.fusion.graph.regions import Region, find_regions
from nostall.fusion.recompute.partial_reads import views_of_parts


def captured_regions(
    captured: CapturedGraph,
    calls: Mapping[int, object] | None = None,
    input_views: Collection[int] = (),
) -> tuple[Region, ...]:
    """The regions of a graph; ``calls`` and ``input_views`` as of :func:`find_regions`.

    Views that have a node in the FX graph are inputs, too, if a kernel can read their parts only so
    (:func:`.views_of_parts`).
    """
    views = views_of_parts(captured.graph) & captured.origins.keys()
    return find_regions(captured.graph, calls, views.union(input_views))
