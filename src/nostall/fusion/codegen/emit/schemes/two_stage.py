"""Emission of two-stage row reductions: the scheme ``column``.

A program of the first kernel loops over a group of rows, block by block. It computes what a row
kernel computes, accumulates the reductions over rows in registers and stores one partial result for
its group. The second kernel reduces the partial results in a fixed order and computes the epilogue.
There are no atomics, so results are bit-identical from run to run.

With ``async_copies`` the loop copies the rows of later iterations while it computes.
"""

from __future__ import annotations

from nostall.fusion.codegen.emit.program import (
    Launch,
    Program,
    Workspace,
    assemble_program,
    kernel_name,
)
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.emit.tile_parts import (
    Chunk,
    Rows,
    TileValue,
    write_row_chunks,
    zero_condition,
)
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES, Value
from nostall.fusion.codegen.loops.addresses import ZERO_TENSOR
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import loop_range
from nostall.fusion.codegen.tiling.planned_kernel import KernelFacts, PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import finish_tile
from nostall.fusion.graph.dynamic_size import Extent


def emit_two_stage(kernel: PlannedKernel) -> Program:
    """The program of the scheme ``column``: the kernels of both stages."""
    schedule, plan = kernel.schedule, kernel.plan
    reductions = [_RowReduction(kernel.facts, index) for index in schedule.row_reductions]
    stages = [_first_stage(kernel, reductions), _second_stage(kernel, reductions)]
    workspaces = tuple(
        Workspace(f"w{each.index}", each.reduction.dtype, plan.splits * each.results)
        for each in reductions
    )
    return assemble_program(kernel, stages, workspaces)


class _RowReduction:
    """A reduction over rows, and possibly over columns, too."""

    def __init__(self, facts: KernelFacts, index: int) -> None:
        schedule = facts.schedule
        self.index, self.reduction = index, facts.reductions[index]
        (operand,) = schedule.mapping.operands[index]
        self.reduces_columns = bool(schedule.mapping.reduced_loops[index] & set(schedule.columns))
        # Whether the result has columns.
        self.keeps_columns = schedule.operand_has_columns(operand) and not self.reduces_columns
        # Elements of the result.
        result_rows = schedule.count(_result_rows(schedule))
        self.results = result_rows * (schedule.column_count if self.keeps_columns else 1)

    def accumulator(self, chunk: Chunk | None) -> str:
        """The name of the accumulator; one for each chunk if the result has columns."""
        return f"a{self.index}{chunk.suffix if chunk else ''}"


def _result_rows(schedule: Schedule) -> tuple[int, ...]:
    """The row loops that no reduction removes: those of the result."""
    return schedule.rows[: len(schedule.rows) - len(schedule.reduced_rows)]


def _first_stage(kernel: PlannedKernel, reductions: list[_RowReduction]) -> tuple[Lines, Launch]:
    """The kernel that reduces a group of rows for each program: its body and its launch."""
    schedule, plan = kernel.schedule, kernel.plan
    lines = Lines()
    reduced_rows = schedule.count(schedule.reduced_rows)
    span = Extent(reduced_rows, plan.rows * plan.splits, plan.rows)
    result_rows = schedule.count(_result_rows(schedule))
    with lines.block():
        lines("kept = tl.program_id(0)")
        lines("group = tl.program_id(1)")
        chunks = write_row_chunks(kernel, lines)
        for each in reductions:
            for chunk in chunks if each.keeps_columns else (None,):
                shape = f"({plan.rows}, {chunk.width if chunk else 1})"
                fill = f"{each.reduction.neutral}, {TRITON_DTYPES[each.reduction.dtype]}"
                lines(f"{each.accumulator(chunk)} = tl.full({shape}, {fill})")
        lines("start = group * span")
        before_loop = Tile(
            kernel.facts, schedule.columns, Rows((), 1, "0", None, ""), chunks, lines
        )
        if plan.async_copies:
            # In the loop, every iteration would copy these operands again.
            before_loop.preload((*schedule.body, *schedule.row_reductions), row_dependent=False)
        stop = "tl.minimum(start + span, count)"
        iterations = loop_range("start", stop, plan.rows, plan.async_copies)
        with lines.block(f"for first in {iterations}:"):
            tile = before_loop.with_rows(_write_row_block(kernel, lines))
            tile.write(schedule.body)
            for each in reductions:
                _accumulate(tile, each)
        for each in reductions:
            for chunk in chunks if each.keeps_columns else (None,):
                text = each.accumulator(chunk)
                text = each.reduction.reduce(text, 0) if plan.rows > 1 else text
                group = f"(group * {result_rows} + kept)" if result_rows > 1 else "group"
                _store_partial(lines, each, chunk, group, schedule.column_count, text)
    stores = [i for i in schedule.body if i in schedule.mapping.outputs]
    reads = schedule.mapping.inputs_of((*schedule.body, *schedule.row_reductions))
    arguments = _stage_arguments([*reads, *stores], reductions)
    name = f"{kernel_name(kernel)}_0"
    grid = (result_rows, plan.splits)
    return lines, Launch(name, arguments, (reduced_rows, span), grid, plan.num_warps)


def _stage_arguments(tensors: list[int], reductions: list[_RowReduction]) -> tuple[str, ...]:
    """Argument names of a kernel: its tensors, then the workspaces of all partial results."""
    return (*(f"p{index}" for index in tensors), *(f"w{each.index}" for each in reductions))


def _write_row_block(kernel: PlannedKernel, lines: Lines) -> Rows:
    """Write the row indices of one iteration; ``count`` rows are reduced to each result row."""
    schedule, plan = kernel.schedule, kernel.plan
    if plan.rows == 1:
        lines(f"r = kept * count + first + {ZERO_TENSOR}")
        return Rows(schedule.rows, 1, "r", None, zero_condition("kept + first"))
    lines(f"m = first + tl.arange(0, {plan.rows})[:, None]")
    lines("live = m < count")
    lines("r = kept * count + m")
    return Rows(schedule.rows, plan.rows, "r", "live", zero_condition("kept + first"))


def _accumulate(tile: Tile, row_reduction: _RowReduction) -> None:
    """Add the rows of one iteration to the accumulators of a reduction."""
    index, reduction = row_reduction.index, row_reduction.reduction
    tile.lines(f"# {tile.graph.describe(index)}")
    if row_reduction.keeps_columns:
        for chunk in tile.chunks:
            text, has_rows = tile.partial_result(index, reduction, chunk)
            _combine(tile, row_reduction, chunk, text, has_rows)
    elif row_reduction.reduces_columns:
        text, has_rows = tile.reduce_columns(index, reduction)
        _combine(tile, row_reduction, None, text, has_rows)
    else:
        entry = tile.operand_value(tile.mapping.operands[index][0], None)
        text = reduction.to_partial(entry.value)
        _combine(tile, row_reduction, None, text, entry.has_rows)


def _combine(
    tile: Tile, row_reduction: _RowReduction, chunk: Chunk | None, text: str, has_rows: bool
) -> None:
    """Combine an accumulator with ``text``; rows that do not exist become the neutral element."""
    reduction, accumulator = row_reduction.reduction, row_reduction.accumulator(chunk)
    if tile.rows.mask:
        if not has_rows:
            shape = f"({tile.rows.count}, {chunk.width if chunk else 1})"
            text = f"tl.broadcast_to({text}, {shape})"
        text = f"tl.where({tile.rows.mask}, {text}, {reduction.neutral})"
    tile.lines(f"{accumulator} = {reduction.combine(accumulator, text)}")


def _store_partial(
    lines: Lines,
    row_reduction: _RowReduction,
    chunk: Chunk | None,
    group: str,
    columns: int,
    text: str,
) -> None:
    """Store the partial result of a group of rows in the workspace of the reduction."""
    workspace = f"w{row_reduction.index}"
    if chunk is None:
        lines(f"tl.store({workspace} + {group} + {ZERO_TENSOR}, {text})")
        return
    mask = f", mask={chunk.mask}" if chunk.mask else ""
    lines(f"tl.store({workspace} + {group} * {columns} + {chunk.counter}, {text}{mask})")


def _second_stage(kernel: PlannedKernel, reductions: list[_RowReduction]) -> tuple[Lines, Launch]:
    """The kernel that reduces the partial results and computes the epilogue: body and launch."""
    schedule, plan = kernel.schedule, kernel.plan
    # All results form one long row: the result rows, and the columns if a reduction keeps them.
    keeps_columns = any(each.keeps_columns for each in reductions)
    loops = _result_rows(schedule) + (schedule.columns if keeps_columns else ())
    results = schedule.count(loops)
    width, warps = finish_tile(plan.splits, results)
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
        lines(f"inside = c < {results}")
        lines(f"group = tl.arange(0, {plan.splits})[:, None]")
        rows = Rows((), 1, "0", None, zero_condition("pid"))
        tile = Tile(kernel.facts, loops, rows, (Chunk(width, "c", "inside", ""),), lines)
        for each in reductions:
            _write_final_result(tile, each, results)
        tile.write(schedule.epilogue)
    outputs = [
        i for i in (*schedule.row_reductions, *schedule.epilogue) if i in schedule.mapping.outputs
    ]
    reads = schedule.mapping.inputs_of(schedule.epilogue)
    arguments = _stage_arguments([*reads, *outputs], reductions)
    name = f"{kernel_name(kernel)}_1"
    grid = (-(-results // width), 1)
    return lines, Launch(name, arguments, (), grid, warps)


def _write_final_result(tile: Tile, row_reduction: _RowReduction, results: int) -> None:
    """Reduce the partial results of all groups; the tile has ``results`` columns."""
    lines, index, reduction = tile.lines, row_reduction.index, row_reduction.reduction
    count = row_reduction.results
    lines(f"# {tile.graph.describe(index)}")
    if count == results:
        offset, mask = "c", ", mask=inside"
    elif count == 1:
        offset, mask = ZERO_TENSOR, ""
    else:
        offset, mask = f"c // {results // count}", ", mask=inside"
    lines(f"a{index} = tl.load(w{index} + group * {count} + {offset}{mask})")
    result = reduction.from_partial(reduction.reduce(f"a{index}", 0))
    lines(f"v{index} = {result.text}")
    value = Value(f"v{index}", result.dtype)
    tile.values[index, ""] = TileValue(value, has_rows=False, has_columns=count > 1)
    if index in tile.mapping.outputs:
        tile.store(index)
