"""Sums over rows beside sums over columns: each program walks over a group of rows.

The first kernel does what a row kernel does, row block after row block, and keeps the tails (the
reductions over rows) in registers; at the end it writes one partial result for its group.  The
second kernel reduces those, all at once and so in a fixed order, and goes on with what follows.
No atomics: the bits are the same in every run.

Plans that are ``ahead`` copy the rows of the next turns meanwhile (``stages``).
"""

from __future__ import annotations

from nostall.fusion.codegen.emit.program import (
    Launch,
    Program,
    Workspace,
    assemble_program,
    kernel_name,
)
from nostall.fusion.codegen.emit.prologue import write_row_chunks, zero_condition
from nostall.fusion.codegen.emit.tile import Chunk, Rows, Tile, TileValue
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Reduction,
    Value,
    make_reduction,
)
from nostall.fusion.codegen.loops.addresses import ZERO_TENSOR
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import loop_range
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import finish_tile
from nostall.fusion.graph.dynamic_size import Extent


def emit_two_stage(kernel: PlannedKernel) -> Program:
    """The program of the scheme ``column``: the kernels of both stages."""
    schedule, plan = kernel.schedule, kernel.plan
    tails = [_RowReduction(schedule, index) for index in schedule.row_reductions]
    first, last = _first_stage(kernel, tails), _second_stage(kernel, tails)
    workspaces = tuple(
        Workspace(f"w{tail.index}", tail.reduction.dtype, plan.splits * tail.results)
        for tail in tails
    )
    return assemble_program(kernel, [first, last], workspaces)


class _RowReduction:
    """A reduction over rows.  ``keeps_columns``: it keeps the columns."""

    def __init__(self, schedule: Schedule, index: int) -> None:
        self.index = index
        self.reduction: Reduction = make_reduction(schedule.mapping.graph[index])
        (operand,) = schedule.mapping.operands[index]
        self.over_columns = bool(schedule.mapping.reduced_loops[index] & set(schedule.columns))
        self.reads_columns = schedule.operand_has_columns(operand)
        self.keeps_columns = self.reads_columns and not self.over_columns
        self.result_rows = schedule.count(_result_rows(schedule))
        self.results = self.result_rows * (schedule.column_count if self.keeps_columns else 1)


def _result_rows(schedule: Schedule) -> tuple[int, ...]:
    return schedule.rows[: len(schedule.rows) - len(schedule.reduced_rows)]


def _first_stage(kernel: PlannedKernel, tails: list[_RowReduction]) -> tuple[Lines, Launch]:
    schedule, plan = kernel.schedule, kernel.plan
    lines = Lines()
    summed = schedule.count(schedule.reduced_rows)
    span = Extent(summed, plan.rows * plan.splits, plan.rows)
    kept = schedule.count(_result_rows(schedule))
    with lines.block():
        lines("kept = tl.program_id(0)")
        lines("group = tl.program_id(1)")
        chunks = write_row_chunks(kernel, lines)
        for tail in tails:
            for chunk in chunks if tail.keeps_columns else (None,):
                shape = f"({plan.rows}, {chunk.width if chunk else 1})"
                dtype = TRITON_DTYPES[tail.reduction.dtype]
                lines(
                    f"{_accumulator(tail, chunk)} = tl.full({shape}, {tail.reduction.neutral}, {dtype})"
                )
        lines("start = group * span")
        above = Tile(schedule, schedule.columns, Rows((), 1, "0", None, ""), chunks, lines)
        if plan.async_copies:
            # In the loop it would be copied again and again.
            above.preload((*schedule.body, *schedule.row_reductions), by_row=False)
        stop = "tl.minimum(start + span, count)"
        with lines.block(
            f"for first in {loop_range('start', stop, plan.rows, plan.async_copies)}:"
        ):
            tile = above.with_rows(_rows_of_group(kernel, lines))
            tile.write(schedule.body)
            for tail in tails:
                _accumulate(tile, tail)
        for tail in tails:
            for chunk in chunks if tail.keeps_columns else (None,):
                text = _accumulator(tail, chunk)
                text = tail.reduction.reduce(text, 0) if plan.rows > 1 else text
                _store_partial(lines, tail, chunk, kept, schedule.column_count, text)
    stores = [i for i in schedule.body if i in schedule.mapping.outputs]
    reads = schedule.mapping.inputs_of((*schedule.body, *schedule.row_reductions))
    arguments = (*(f"p{i}" for i in [*reads, *stores]), *(f"w{t.index}" for t in tails))
    name = f"{kernel_name(kernel)}_0"
    return lines, Launch(name, arguments, (summed, span), (kept, plan.splits), plan.num_warps)


def _rows_of_group(kernel: PlannedKernel, lines: Lines) -> Rows:
    """``count`` rows are summed for each kept one."""
    schedule, plan = kernel.schedule, kernel.plan
    if plan.rows == 1:
        lines(f"r = kept * count + first + {ZERO_TENSOR}")
        return Rows(schedule.rows, 1, "r", None, zero_condition("kept + first"))
    lines(f"m = first + tl.arange(0, {plan.rows})[:, None]")
    lines("live = m < count")
    lines("r = kept * count + m")
    return Rows(schedule.rows, plan.rows, "r", "live", zero_condition("kept + first"))


def _accumulator(tail: _RowReduction, chunk: Chunk | None) -> str:
    return f"a{tail.index}{chunk.suffix if chunk else ''}"


def _accumulate(tile: Tile, tail: _RowReduction) -> None:
    tile.lines(f"# {tile.graph.describe(tail.index)}")
    if tail.keeps_columns:
        for chunk in tile.chunks:
            text, has_rows = tile.partial_result(tail.index, tail.reduction, chunk)
            _add(tile, tail, _accumulator(tail, chunk), text, has_rows, chunk.width)
        return
    if not tail.over_columns:
        entry = tile.operand_value(tile.mapping.operands[tail.index][0], None)
        _add(
            tile,
            tail,
            _accumulator(tail, None),
            tail.reduction.to_partial(entry.value),
            entry.has_rows,
            1,
        )
        return
    total, has_rows = tile.reduce_columns(tail.index, tail.reduction)
    _add(tile, tail, _accumulator(tail, None), total, has_rows, 1)


def _add(tile: Tile, tail: _RowReduction, held: str, text: str, has_rows: bool, width: int) -> None:
    """Put the rows of this block to what a tail holds; rows that do not exist are neutral."""
    if tile.rows.mask:
        if not has_rows:
            text = f"tl.broadcast_to({text}, ({tile.rows.count}, {width}))"
        text = f"tl.where({tile.rows.mask}, {text}, {tail.reduction.neutral})"
    tile.lines(f"{held} = {tail.reduction.combine(held, text)}")


def _store_partial(
    lines: Lines, tail: _RowReduction, chunk: Chunk | None, kept: int, columns: int, text: str
) -> None:
    group = f"(group * {kept} + kept)" if kept > 1 else "group"
    if chunk is None:
        lines(f"tl.store(w{tail.index} + {group} + {ZERO_TENSOR}, {text})")
        return
    mask = f", mask={chunk.mask}" if chunk.mask else ""
    lines(f"tl.store(w{tail.index} + {group} * {columns} + {chunk.counter}, {text}{mask})")


def _second_stage(kernel: PlannedKernel, tails: list[_RowReduction]) -> tuple[Lines, Launch]:
    schedule, plan = kernel.schedule, kernel.plan
    kept = _result_rows(schedule)
    # Results are walked over as one long row: kept rows, and columns where a tail has them.
    loops = kept + (schedule.columns if any(tail.keeps_columns for tail in tails) else ())
    results = schedule.count(loops)
    width, warps = finish_tile(plan.splits, results)
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
        lines(f"inside = c < {results}")
        lines(f"group = tl.arange(0, {plan.splits})[:, None]")
        rows = Rows((), 1, "0", None, zero_condition("pid"))
        tile = Tile(schedule, loops, rows, (Chunk(width, "c", "inside", ""),), lines)
        for tail in tails:
            _write_total(tile, tail, results)
        tile.write(schedule.epilogue)
    outputs = [
        i for i in (*schedule.row_reductions, *schedule.epilogue) if i in schedule.mapping.outputs
    ]
    reads = schedule.mapping.inputs_of(schedule.epilogue)
    arguments = (*(f"p{i}" for i in [*reads, *outputs]), *(f"w{t.index}" for t in tails))
    name = f"{kernel_name(kernel)}_1"
    grid = (-(-results // width), 1)
    return lines, Launch(name, arguments, (), grid, warps)


def _write_total(tile: Tile, tail: _RowReduction, results: int) -> None:
    lines, index = tile.lines, tail.index
    lines(f"# {tile.graph.describe(index)}")
    if tail.results == results:
        where, mask = "c", ", mask=inside"
    elif tail.results == 1:
        where, mask = ZERO_TENSOR, ""
    else:
        where, mask = f"c // {results // tail.results}", ", mask=inside"
    lines(f"a{index} = tl.load(w{index} + group * {tail.results} + {where}{mask})")
    result = tail.reduction.from_partial(tail.reduction.reduce(f"a{index}", 0))
    lines(f"v{index} = {result.text}")
    entry = TileValue(
        Value(f"v{index}", result.dtype), has_rows=False, has_columns=tail.results > 1
    )
    tile.values[index, ""] = entry
    if index in tile.mapping.outputs:
        tile.store(index)
