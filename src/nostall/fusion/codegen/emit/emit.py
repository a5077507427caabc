"""Readable Triton for a schedule and a plan; equal ones give equal bytes."""

from __future__ import annotations

from nostall.fusion.codegen.emit.dots import write_matrices
from nostall.fusion.codegen.emit.multi_pass import emit_split, write_looped
from nostall.fusion.codegen.emit.program import RELEASE, Launch, Program, base_name, program
from nostall.fusion.codegen.emit.prologue import (
    is_specialised,
    is_zero,
    limit,
    row_block,
    whole_row,
)
from nostall.fusion.codegen.emit.sequence import write_turned
from nostall.fusion.codegen.emit.shared import emit_shared
from nostall.fusion.codegen.emit.tile import Chunk, Rows, Tile
from nostall.fusion.codegen.emit.two_stage import emit_column
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, large_outputs, refusal
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import Extent


def emit(of: Schedule, plan: KernelPlan) -> Program:
    """The source of one pattern.  Raises :class:`BadFusion` where the plan does not fit it."""
    reason = refusal(of, plan)
    if reason is not None:
        raise BadFusion(f"plan {plan} does not fit: {reason}; take one of plans(schedule).legal")
    if plan.scheme == "split":
        return emit_split(of, plan)
    if plan.scheme == "column":
        return emit_column(of, plan)
    if plan.scheme == "shared":
        return emit_shared(of, plan)
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        programs = write_body(of, plan, lines)
    grid = (programs, 1)
    name = base_name(of.mapping, plan)
    counts = (of.counted,)
    launch = Launch(name, tensors(of), counts, grid, plan.num_warps, is_specialised(of))
    return program(of.mapping, plan, [(lines, launch)])


def tensors(of: Schedule) -> tuple[str, ...]:
    """What a kernel that does all of a pattern reads and writes."""
    return tuple(f"p{i}" for i in (*of.mapping.inputs, *of.mapping.outputs))


def write_body(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """The body of the only kernel of a plan, for the program number ``pid`` and ``count``; returns
    how many programs there are."""
    if plan.scheme == "thread":
        return _flat(of, plan, lines)
    if plan.scheme == "looped":
        return write_looped(of, plan, lines)
    if plan.scheme == "matrix":
        return write_matrices(of, plan, lines)
    if plan.scheme == "turned":
        return write_turned(of, plan, lines)
    return _held(of, plan, lines)


def _flat(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """No reductions: all loops are columns of one long row."""
    width = plan.chunks[0]
    lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
    mask = None
    if of.mapping.graph.varying is not None or of.row_count % width:
        mask = "inside"
        lines(f"{mask} = c < {limit(of)}")
    rows = Rows((), 1, "0", None, is_zero("pid"))
    tile = Tile(of, of.rows, rows, (Chunk(width, "c", mask, ""),), lines)
    tile.streamed = large_outputs(of) if plan.streamed else frozenset()
    tile.load_ahead(of.body)
    if plan.early:
        lines(RELEASE)
    if not plan.streamed:
        tile.write(of.body)
        return Extent(of.row_count, width)
    # Warps that have waited for each other write more of one place in memory at a time.
    tile.write(of.body, stores=())
    lines("tl.debug_barrier()")
    for index in of.mapping.outputs:
        tile.store(index)
    return Extent(of.row_count, width)


def _held(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """Whole rows in registers, across all reductions."""
    rows = row_block(of, plan, lines, "pid")
    chunks = whole_row(of, plan, lines)
    tile = Tile(of, of.columns, rows, chunks, lines)
    tile.streamed = large_outputs(of) if plan.streamed else frozenset()
    tile.load_ahead(of.body)
    if plan.early and of.shared_late:
        tile.load_ahead(of.body, by_row=False)
    elif plan.early:
        lines(RELEASE)
    tile.write(of.body)
    return Extent(of.row_count, plan.rows)
