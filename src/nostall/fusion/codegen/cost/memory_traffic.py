"""Bytes that kernels move, and what memory sectors add if a tile has few contiguous rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nostall.fusion.codegen.cost.gpu import KernelCost
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.operations import DTYPE_BYTES

PARTIAL_RESULT_BYTES = 4
"""Bytes of one partial result of a reduction."""
SECTOR_BYTES = 32
"""The smallest amount of memory that L2 transfers."""
_SECTOR_PAIR_BYTES = 64
"""Two sectors. Memory prefers to transfer them together (measured: single ones take longer)."""


def tensor_bytes(schedule: Schedule, reads: Iterable[int], writes: Iterable[int]) -> float:
    """Bytes of the tensors that are read and written, each once."""
    return float(sum(schedule.mapping.graph[index].bytes for index in (*reads, *writes)))


def with_sector_waste(kernel: PlannedKernel, cost: KernelCost) -> KernelCost:
    """The cost with the traffic of partly used sectors, if rows are contiguous in memory.

    A tile of few rows then reads short runs: sectors contain bytes that only other programs need,
    sectors are written in parts, and sectors are transferred without the other one of their pair.
    """
    schedule = kernel.schedule
    if not schedule.is_column_major:
        return cost
    graph, outputs = schedule.mapping.graph, set(schedule.mapping.outputs)
    needed = wasted = partial = unpaired = 0.0
    for index in (*schedule.mapping.inputs, *schedule.mapping.outputs):
        run, size = kernel.plan.rows * DTYPE_BYTES[graph[index].dtype], graph[index].bytes
        waste = size * max(0.0, SECTOR_BYTES / run - 1)
        needed += size
        wasted += waste
        partial += waste * (index in outputs)
        unpaired += size * (run < _SECTOR_PAIR_BYTES)
    share = 1 / max(1.0, needed)
    return replace(
        cost,
        overfetched_bytes=(cost.memory_bytes + cost.reread_bytes) * wasted * share,
        partial_sector_bytes=cost.memory_bytes * partial * share,
        unpaired_sector_bytes=cost.memory_bytes * unpaired * share,
    )
