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


def emit(of: Schedule, plan: KernelPlan) -> Program:
    """The source of one pattern.  Raises :class:`BadFusion` where the plan does not fit it."""
    reason = illegal_reason(of, plan)
    if reason is not None:
        raise BadFusion(f"plan {plan} does not fit: {reason}; take one of plans(schedule).legal")
    if plan.scheme == "split":
        return emit_split(of, plan)
    if plan.scheme == "column":
        return emit_two_stage(of, plan)
    if plan.scheme == "shared":
        return emit_shared(of, plan)
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        programs = write_body(of, plan, lines)
    grid = (programs, 1)
    name = kernel_name(of.mapping, plan)
    counts = (of.outer_row_count,)
    launch = Launch(
        name, tensor_arguments(of), counts, grid, plan.num_warps, specializes_counts(of)
    )
    return assemble_program(of.mapping, plan, [(lines, launch)])


def tensor_arguments(of: Schedule) -> tuple[str, ...]:
    """What a kernel that does all of a pattern reads and writes."""
    return tuple(f"p{i}" for i in (*of.mapping.inputs, *of.mapping.outputs))


def write_body(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """The body of the only kernel of a plan, for the program number ``pid`` and ``count``; returns
    how many programs there are."""
    if plan.scheme == "thread":
        return _write_flat(of, plan, lines)
    if plan.scheme == "looped":
        return write_looped(of, plan, lines)
    if plan.scheme == "matrix":
        return write_matrices(of, plan, lines)
    if plan.scheme == "turned":
        return write_sequence(of, plan, lines)
    return _write_register_rows(of, plan, lines)


def _write_flat(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """No reductions: all loops are columns of one long row."""
    width = plan.chunks[0]
    lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
    mask = None
    if of.mapping.graph.varying is not None or of.row_count % width:
        mask = "inside"
        lines(f"{mask} = c < {row_limit(of)}")
    rows = Rows((), 1, "0", None, zero_condition("pid"))
    tile = Tile(of, of.rows, rows, (Chunk(width, "c", mask, ""),), lines)
    tile.evict_first = large_outputs(of) if plan.evict_first else frozenset()
    tile.preload(of.body)
    if plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    if not plan.evict_first:
        tile.write(of.body)
        return Extent(of.row_count, width)
    # Warps that have waited for each other write more of one place in memory at a time.
    tile.write(of.body, stores=())
    lines("tl.debug_barrier()")
    for index in of.mapping.outputs:
        tile.store(index)
    return Extent(of.row_count, width)


def _write_register_rows(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """Whole rows in registers, across all reductions."""
    rows = write_row_block(of, plan, lines, "pid")
    chunks = write_row_chunks(of, plan, lines)
    tile = Tile(of, of.columns, rows, chunks, lines)
    tile.evict_first = large_outputs(of) if plan.evict_first else frozenset()
    tile.preload(of.body)
    if plan.eager_loads and of.late_broadcast_operands:
        tile.preload(of.body, by_row=False)
    elif plan.eager_loads:
        lines(LAUNCH_DEPENDENTS)
    tile.write(of.body)
    return Extent(of.row_count, plan.rows)
