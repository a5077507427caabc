"""The partition that regions are stitched with: FusionStitching's, with three corrections."""

from __future__ import annotations

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore.epilogue_fusion import fuse_epilogues
from nostall.fusion.explore.explorer import explore
from nostall.fusion.explore.kernel_merging import merge_kernels
from nostall.fusion.explore.kernel_splitting import split_kernels, unpack_kernels
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import members


def default_partition(graph: Graph) -> list[tuple[int, ...]]:
    """The kernels of a region's graph, each as a tuple of operators.

    Starts with the explorer's partition, splits kernels that several kernels would beat (modelled),
    merges kernels that one kernel would beat, and fuses the epilogues of sums over rows into the
    kernels that compute the sums.
    """
    groups = [members(group) for group in explore(DeltaEvaluator(graph)).partition.groups]
    split = unpack_kernels(graph, split_kernels(graph, groups))
    return fuse_epilogues(graph, merge_kernels(graph, split))
