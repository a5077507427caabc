"""The plan by which a region is stitched: the published explorer's, parted and joined where that is
faster."""

from __future__ import annotations

from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.explore import explore
from nostall.fusion.explore.epilogue_fusion import finished
from nostall.fusion.explore.kernel_splitting import parted, unpacked
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import members


def explored(graph: Graph) -> list[tuple[int, ...]]:
    """The published explorer's plan; where one kernel takes longer than several would it is parted,
    and what follows sums over rows is joined to them."""
    groups = [members(group) for group in explore(Delta(graph)).plan.groups]
    return finished(graph, unpacked(graph, parted(graph, groups)))
