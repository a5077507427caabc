"""Readable Triton for a schedule and a plan; equal ones give equal bytes."""

from __future__ import annotations

from nostall.fusion.codegen.emit.dots import write_matrices
from nostall.fusion.codegen.emit.multi_pass import emit_split, write_looped
from nostall.fusion.codegen.emit.program import (
    LAUNCH_DEPENDENTS,
    Launch,
    Program,
    assemble_program,
    kernel_name,
)
from nostall.fusion.codegen.emit.prologue import (
    row_limit,
    specializes_counts,
    write_row_block,
    write_row_chunks,
    zero_condition,
)
from nostall.fusion.codegen.emit.sequence import write_sequence
from nostall.fusion.codegen.emit.shared import emit_shared
from nostall.fusion.codegen.emit.tile import Chunk, Rows, Tile
from nostall.fusion.codegen.emit.two_stage import emit_two_stage
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, illegal_reason, large_outputs
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import Extent


def emit(schedule: Schedule, plan: KernelPlan) -> Program:
    """The source of one pattern.  Raises :class:`BadFusion` where the plan does not fit it."""
    reason = illegal_reason(schedule, plan)
    if reason is not None:
        raise BadFusion(f"plan {plan} does not fit: {reason}; take one of plans(schedule).legal")
    if plan.scheme == "split":
        return emit_split(schedule, plan)
    if plan.scheme == "column":
        return emit_two_stage(schedule, plan)
    if plan.scheme == "shared":
        return emit_shared(schedule, plan)
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        programs = write_body(schedule, plan, lines)
    grid = (programs, 1)
    name = kernel_name(schedule.mapping, plan)
    counts = (schedule.outer_row_count,)
    launch = Launch(
        name, tensor_arguments(schedule), counts, grid, plan.num_warps, specializes_counts(schedule)
    )
    return assemble_program(schedule.mapping, plan, [(lines, launch)])


def tensor_arguments(schedule: Schedule) -> tuple[str, ...]:
    """What a kernel that does all of a pattern reads and writes."""
    return tuple(f"p{i}" for i in (*schedule.mapping.inputs, *schedule.mapping.outputs))


def write_body(schedule: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """The body of the only kernel of a plan, for the program number ``pid`` and ``count``; returns
    how many programs there are."""
    if plan.scheme == "thread":
        return _write_flat(schedule, plan, lines)
    if plan.scheme == "looped":
        return write_looped(schedule, plan, lines)
    if plan.scheme == "matrix":
        return write_matrices(schedule, plan, lines)
    if plan.scheme == "turned":
        return write_sequence(schedule, plan, lines)
    return _write_register_rows(schedule, plan, lines)


def _write_flat(schedule: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """No reductions: all loops are columns of one long row."""
    width = plan.chunks[0]
    lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
    mask = None
    if schedule.mapping.graph.varying is not None or schedule.row_count % width:
        mask = "inside"
        lines(f"{mask} = c < {row_limit(schedule)}")
    rows = Rows((), 1, "0", None, zero_condition("pid"))
    tile = Tile(schedule, schedule.rows, rows, (Chunk(width, "c", mask, ""),), lines)
    tile.evict_first = large_outputs(schedule) if plan.evict_first else frozenset()
    tile.preload(schedule.body)
    if plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    if not plan.evict_first:
        tile.write(schedule.body)
        return Extent(schedule.row_count, width)
    # Warps that have waited for each other write more of one place in memory at a time.
    tile.write(schedule.body, stores=())
    lines("tl.debug_barrier()")
    for index in schedule.mapping.outputs:
        tile.store(index)
    return Extent(schedule.row_count, width)


def _write_register_rows(schedule: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """Whole rows in registers, across all reductions."""
    rows = write_row_block(schedule, plan, lines, "pid")
    chunks = write_row_chunks(schedule, plan, lines)
    tile = Tile(schedule, schedule.columns, rows, chunks, lines)
    tile.evict_first = large_outputs(schedule) if plan.evict_first else frozenset()
    tile.preload(schedule.body)
    if plan.eager_loads and schedule.late_broadcast_operands:
        tile.preload(schedule.body, by_row=False)
    elif plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    tile.write(schedule.body)
    return Extent(schedule.row_count, plan.rows)
