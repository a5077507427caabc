"""Sums over rows beside sums over columns: each program walks over a group of rows.

The first kernel does what a row kernel does, row block after row block, and keeps the tails (the
reductions over rows) in registers; at the end it writes one partial result for its group.  The
second kernel reduces those, all at once and so in a fixed order, and goes on with what follows.
No atomics: the bits are the same in every run.

Plans that are ``ahead`` copy the rows of the next turns meanwhile (``stages``).
"""

from __future__ import annotations

from nostall.fusion.codegen.emit.program import Launch, Program, Workspace, base_name, program
from nostall.fusion.codegen.emit.prologue import is_zero, whole_row
from nostall.fusion.codegen.emit.tile import Chunk, Entry, Rows, Tile
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES, Reduction, Value, reduction
from nostall.fusion.codegen.loops.addresses import ZERO
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import turns
from nostall.fusion.codegen.tiling.kernel_plan import WARP, KernelPlan
from nostall.fusion.codegen.tiling.tile_sizes import power_above
from nostall.fusion.graph.dynamic_size import Extent

FINISH_TILE = 4096
"""Partial results that one program of the second kernel loads at once."""
LEAST_FINISH_WIDTH = 8
"""Its columns: fewer would not fill the 32 bytes that L2 gives at once."""
LEAST_FINISH_WARPS, MOST_FINISH_EACH = 4, 64
"""Its warps, and what a thread has at most of the tile."""


def finish_tile(parts: int, results: int) -> tuple[int, int]:
    """Columns and warps of a program of the second kernel."""
    width = min(power_above(results), max(LEAST_FINISH_WIDTH, FINISH_TILE // parts))
    return width, max(LEAST_FINISH_WARPS, width * parts // (WARP * MOST_FINISH_EACH))


def emit_column(of: Schedule, plan: KernelPlan) -> Program:
    tails = [_Tail(of, index) for index in of.tails]
    first, last = _walk(of, plan, tails), _finish(of, plan, tails)
    workspaces = tuple(
        Workspace(f"w{tail.index}", tail.how.dtype, plan.parts * tail.results) for tail in tails
    )
    return program(of.mapping, plan, [first, last], workspaces)


class _Tail:
    """A reduction over rows.  ``wide``: it keeps the columns."""

    def __init__(self, of: Schedule, index: int) -> None:
        self.index = index
        self.how: Reduction = reduction(of.mapping.graph[index])
        (operand,) = of.mapping.operands[index]
        self.over_columns = bool(of.mapping.reduced[index] & set(of.columns))
        self.reads_columns = of.reads_columns(operand)
        self.wide = self.reads_columns and not self.over_columns
        self.kept = of.count(_kept(of))
        self.results = self.kept * (of.column_count if self.wide else 1)


def _kept(of: Schedule) -> tuple[int, ...]:
    return of.rows[: len(of.rows) - len(of.summed)]


def _walk(of: Schedule, plan: KernelPlan, tails: list[_Tail]) -> tuple[Lines, Launch]:
    lines = Lines()
    summed = of.count(of.summed)
    span = Extent(summed, plan.rows * plan.parts, plan.rows)
    kept = of.count(_kept(of))
    with lines.block():
        lines("kept = tl.program_id(0)")
        lines("group = tl.program_id(1)")
        chunks = whole_row(of, plan, lines)
        for tail in tails:
            for chunk in chunks if tail.wide else (None,):
                shape = f"({plan.rows}, {chunk.width if chunk else 1})"
                dtype = TRITON_DTYPES[tail.how.dtype]
                lines(f"{_held(tail, chunk)} = tl.full({shape}, {tail.how.neutral}, {dtype})")
        lines("start = group * span")
        above = Tile(of, of.columns, Rows((), 1, "0", None, ""), chunks, lines)
        if plan.ahead:
            # In the loop it would be copied again and again.
            above.load_ahead((*of.body, *of.tails), by_row=False)
        stop = "tl.minimum(start + span, count)"
        with lines.block(f"for first in {turns('start', stop, plan.rows, plan.ahead)}:"):
            tile = above.inside(_rows_of_group(of, plan, lines))
            tile.write(of.body)
            for tail in tails:
                _accumulate(tile, tail)
        for tail in tails:
            for chunk in chunks if tail.wide else (None,):
                text = _held(tail, chunk)
                text = tail.how.along(text, 0) if plan.rows > 1 else text
                _store_partial(lines, tail, chunk, kept, of.column_count, text)
    stores = [i for i in of.body if i in of.mapping.outputs]
    reads = of.mapping.read_by((*of.body, *of.tails))
    arguments = (*(f"p{i}" for i in [*reads, *stores]), *(f"w{t.index}" for t in tails))
    name = f"{base_name(of.mapping, plan)}_0"
    return lines, Launch(name, arguments, (summed, span), (kept, plan.parts), plan.num_warps)


def _rows_of_group(of: Schedule, plan: KernelPlan, lines: Lines) -> Rows:
    """``count`` rows are summed for each kept one."""
    if plan.rows == 1:
        lines(f"r = kept * count + first + {ZERO}")
        return Rows(of.rows, 1, "r", None, is_zero("kept + first"))
    lines(f"m = first + tl.arange(0, {plan.rows})[:, None]")
    lines("live = m < count")
    lines("r = kept * count + m")
    return Rows(of.rows, plan.rows, "r", "live", is_zero("kept + first"))


def _held(tail: _Tail, chunk: Chunk | None) -> str:
    return f"a{tail.index}{chunk.suffix if chunk else ''}"


def _accumulate(tile: Tile, tail: _Tail) -> None:
    tile.lines(f"# {tile.graph.describe(tail.index)}")
    if tail.wide:
        for chunk in tile.chunks:
            text, has_rows = tile.partial(tail.index, tail.how, chunk)
            _add(tile, tail, _held(tail, chunk), text, has_rows, chunk.width)
        return
    if not tail.over_columns:
        entry = tile.operand(tile.mapping.operands[tail.index][0], None)
        _add(tile, tail, _held(tail, None), tail.how.partial(entry.value), entry.rows, 1)
        return
    total, has_rows = tile.over_columns(tail.index, tail.how)
    _add(tile, tail, _held(tail, None), total, has_rows, 1)


def _add(tile: Tile, tail: _Tail, held: str, text: str, has_rows: bool, width: int) -> None:
    """Put the rows of this block to what a tail holds; rows that do not exist are neutral."""
    if tile.rows.mask:
        if not has_rows:
            text = f"tl.broadcast_to({text}, ({tile.rows.count}, {width}))"
        text = f"tl.where({tile.rows.mask}, {text}, {tail.how.neutral})"
    tile.lines(f"{held} = {tail.how.both(held, text)}")


def _store_partial(
    lines: Lines, tail: _Tail, chunk: Chunk | None, kept: int, columns: int, text: str
) -> None:
    group = f"(group * {kept} + kept)" if kept > 1 else "group"
    if chunk is None:
        lines(f"tl.store(w{tail.index} + {group} + {ZERO}, {text})")
        return
    mask = f", mask={chunk.mask}" if chunk.mask else ""
    lines(f"tl.store(w{tail.index} + {group} * {columns} + {chunk.counter}, {text}{mask})")


def _finish(of: Schedule, plan: KernelPlan, tails: list[_Tail]) -> tuple[Lines, Launch]:
    kept = _kept(of)
    # Results are walked over as one long row: kept rows, and columns where a tail has them.
    loops = kept + (of.columns if any(tail.wide for tail in tails) else ())
    results = of.count(loops)
    width, warps = finish_tile(plan.parts, results)
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
        lines(f"inside = c < {results}")
        lines(f"group = tl.arange(0, {plan.parts})[:, None]")
        rows = Rows((), 1, "0", None, is_zero("pid"))
        tile = Tile(of, loops, rows, (Chunk(width, "c", "inside", ""),), lines)
        for tail in tails:
            _total(tile, tail, results)
        tile.write(of.after)
    outputs = [i for i in (*of.tails, *of.after) if i in of.mapping.outputs]
    reads = of.mapping.read_by(of.after)
    arguments = (*(f"p{i}" for i in [*reads, *outputs]), *(f"w{t.index}" for t in tails))
    name = f"{base_name(of.mapping, plan)}_1"
    grid = (-(-results // width), 1)
    return lines, Launch(name, arguments, (), grid, warps)


def _total(tile: Tile, tail: _Tail, results: int) -> None:
    lines, index = tile.lines, tail.index
    lines(f"# {tile.graph.describe(index)}")
    if tail.results == results:
        where, mask = "c", ", mask=inside"
    elif tail.results == 1:
        where, mask = ZERO, ""
    else:
        where, mask = f"c // {results // tail.results}", ", mask=inside"
    lines(f"a{index} = tl.load(w{index} + group * {tail.results} + {where}{mask})")
    result = tail.how.result(tail.how.along(f"a{index}", 0))
    lines(f"v{index} = {result.text}")
    entry = Entry(Value(f"v{index}", result.dtype), rows=False, columns=tail.results > 1)
    tile.entries[index, ""] = entry
    if index in tile.mapping.outputs:
        tile.store(index)
