"""Bodies of kernels that hold whole tiles in registers: the schemes thread, warp and block."""

from __future__ import annotations

from nostall.fusion.codegen.emit.program import LAUNCH_DEPENDENTS
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.emit.tile_parts import (
    Chunk,
    Rows,
    row_limit,
    write_row_block,
    write_row_chunks,
    zero_condition,
)
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.tiling.legality import large_outputs
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.dynamic_size import Extent


def write_flat(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``thread``; returns the number of programs.

    There are no reductions, so all loops are the columns of one long row.
    """
    schedule, plan = kernel.schedule, kernel.plan
    width = plan.chunks[0]
    lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
    mask = None
    if schedule.mapping.graph.varying is not None or schedule.row_count % width:
        mask = "inside"
        lines(f"{mask} = c < {row_limit(schedule)}")
    rows = Rows((), 1, "0", None, zero_condition("pid"))
    tile = Tile(kernel.facts, schedule.rows, rows, (Chunk(width, "c", mask, ""),), lines)
    tile.evict_first = large_outputs(schedule) if plan.evict_first else frozenset()
    tile.preload(schedule.body)
    if plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    if not plan.evict_first:
        tile.write(schedule.body)
        return Extent(schedule.row_count, width)
    # After a barrier, warps store neighbouring addresses at the same time.
    tile.write(schedule.body, stores=())
    lines("tl.debug_barrier()")
    for index in schedule.mapping.outputs:
        tile.store(index)
    return Extent(schedule.row_count, width)


def write_register_rows(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the schemes ``warp`` and ``block``; returns the number of
    programs. Whole rows stay in registers across all reductions.
    """
    schedule, plan = kernel.schedule, kernel.plan
    rows = write_row_block(kernel, lines, "pid")
    chunks = write_row_chunks(kernel, lines)
    tile = Tile(kernel.facts, schedule.columns, rows, chunks, lines)
    tile.evict_first = large_outputs(schedule) if plan.evict_first else frozenset()
    tile.preload(schedule.body)
    if plan.eager_loads and schedule.late_broadcast_operands:
        tile.preload(schedule.body, row_dependent=False)
    elif plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    tile.write(schedule.body)
    return Extent(schedule.row_count, plan.rows)
