"""The kernels that a region is stitched with: the partition, with values computed again."""

from __future__ import annotations

from functools import lru_cache

from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.recompute.copies import Kernels
from nostall.fusion.recompute.kernel_times import KernelTimes
from nostall.fusion.recompute.partial_reads import read_parts
from nostall.fusion.recompute.shared_values import MAX_TIME_RATIO, recompute_shared_values


# A region is explored once, and its kernels are tuned later.
@lru_cache(maxsize=8)
def default_kernels(graph: Graph) -> Kernels:
    """The kernels of a region, by the explorer's partition with copies where they gain (modelled).

    First, parts of computed values are computed from parts of their operands.  Then light operators
    are copied into the kernels that read their results.
    """
    kernels = Kernels.of(graph, default_partition(graph))
    with_parts = _kernels_of_parts(graph)
    if with_parts is not None:
        before = KernelTimes(graph).total(kernels.groups)
        after = KernelTimes(with_parts.graph).total(with_parts.groups)
        if before is not None and after is not None and after < MAX_TIME_RATIO * before:
            kernels = with_parts
    return recompute_shared_values(kernels)


def _kernels_of_parts(graph: Graph) -> Kernels | None:
    """The kernels of the graph whose parts of values are computed on their own, if it has any."""
    found = read_parts(graph)
    if found is None:
        return None
    changed, origins = found
    kernels = Kernels(changed, tuple(map(tuple, default_partition(changed))), origins)
    return kernels if kernels.store_known_values else None
