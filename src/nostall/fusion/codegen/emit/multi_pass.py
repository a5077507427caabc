"""Rows that are not held in registers: one pass over the columns for each level of reductions.

What the reductions of the next level and the outputs need is computed again from memory.  *Looped*
runs the passes (:mod:`nostall.fusion.codegen.loops.reduction_levels`) in one kernel.  *Split* shares a row among
several programs and runs a kernel for each pass; partial results go through memory and every
program of the next kernel adds them up in the same order, so the result does not depend on which
program was first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from nostall.fusion.codegen.emit.program import Launch, Program, Workspace, base_name, program
from nostall.fusion.codegen.emit.prologue import is_specialised, is_zero, limit, row_block
from nostall.fusion.codegen.emit.tile import Chunk, Rows, Tile
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import (
    LARGEST_FLOAT,
    TRITON_DTYPES,
    Reduction,
    reduction,
)
from nostall.fusion.codegen.loops.online_softmax import Pair
from nostall.fusion.codegen.loops.reduction_levels import Pass, passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import turns
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import lanes, peeled
from nostall.fusion.graph.dynamic_size import Extent


def write_looped(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """The body of a kernel whose program is number ``pid``; returns how many programs there are."""
    rows = row_block(of, plan, lines, "pid")
    tile = _tile(of, plan, rows, lines)
    for number, part in enumerate(passes(of)):
        lines(f"# pass {number}")
        write_narrow(tile, part)
        if part.has_columns:
            _columns(tile, part, "0", _end(of, plan), plan.ahead)
            _results(tile, part, part.reductions)
    return Extent(of.row_count, plan.rows)


def emit_split(of: Schedule, plan: KernelPlan) -> Program:
    kernels = []
    graph = of.mapping.graph
    width = plan.chunks[0]
    span = -(-lanes(of, plan.peeled) // (width * plan.parts)) * width
    name = base_name(of.mapping, plan)
    for number, part in enumerate(passes(of)):
        lines = Lines()
        with lines.block():
            lines("pid = tl.program_id(0)")
            lines("part = tl.program_id(1)")
            rows = row_block(of, plan, lines, "pid")
            tile = _tile(of, plan, rows, lines)
            for index in part.running(part.finished):
                _load_partial(tile, index, plan.parts)
            _results(tile, part, part.finished, plan.parts)
            write_narrow(tile, part, only=is_zero("part"))
            if part.has_columns:
                lines(f"start = part * {span}")
                stop = f"tl.minimum(start + {span}, {_end(of, plan)})"
                _columns(tile, part, "start", stop, plan.ahead)
                _store_partials(tile, part, plan.parts)
        arguments = _used(of, part)
        grid = (Extent(of.row_count, plan.rows), plan.parts if part.has_columns else 1)
        told = f"{name}_{number}", arguments, (of.counted,), grid, plan.num_warps
        launch = Launch(*told, is_specialised(of))
        kernels.append((lines, launch))
    partial = {i for part in passes(of) for i in part.running(part.reductions)}
    workspaces = tuple(
        Workspace(f"w{i}", reduction(graph[i]).dtype, of.row_count * plan.parts)
        for i in of.body
        if i in partial
    )
    return program(of.mapping, plan, kernels, workspaces)


def _end(of: Schedule, plan: KernelPlan) -> str:
    """The first column, or lane, that is none."""
    return f"ahead + {of.column_count}" if plan.peeled else str(of.column_count)


def _tile(of: Schedule, plan: KernelPlan, rows: Rows, lines: Lines) -> Tile:
    width, lies = plan.chunks[0], peeled(of) if plan.peeled else None
    if lies:
        lies.write_row(lines, of.column_count, limit(of))
    chunk = Chunk(width, "c", "inside" if lies or of.column_count % width else None, "", lies)
    return Tile(of, of.columns, rows, (chunk,), lines)


def write_narrow(tile: Tile, part: Pass, only: str | None = None) -> None:
    """The operators of a pass that have no columns, and their stores."""
    for index in part.narrow:
        if (index, "") not in tile.entries:
            tile.compute(index)
    for index in part.narrow_outputs:
        tile.store(index, only)


def _columns(tile: Tile, part: Pass, start: str, stop: str, ahead: bool) -> None:
    """Loops over columns that accumulate the reductions of a pass and store its outputs: turns of
    which every lane exists, which may be copied ``ahead``, and what is before and behind them."""
    lines, (chunk,) = tile.lines, tile.chunks
    online = {pair.maximum: pair.total for pair in part.pairs}
    for index in part.running(part.reductions):
        how = reduction(tile.graph[index])
        shape = f"({tile.rows.count}, {chunk.width})"
        # The difference of -inf with itself would be NaN.
        begin = repr(-LARGEST_FLOAT) if index in online else how.neutral
        lines(f"a{index} = tl.full({shape}, {begin}, {TRITON_DTYPES[how.dtype]})")
    for first, last, some in _loops(tile, start, stop):
        counted = turns(first, last, chunk.width, ahead and some.mask is None)
        _walk(tile.over(some), part, counted, online)
    for index, total in online.items():
        lines(f'a{index} = tl.where(a{total} == 0.0, float("-inf"), a{index})')


def _loops(tile: Tile, start: str, stop: str) -> list[tuple[str, str, Chunk]]:
    """Where the turns of each loop begin and end, and their lanes."""
    lines, (chunk,), columns = tile.lines, tile.chunks, tile.of.column_count
    if chunk.mask is None:
        return [(start, stop, chunk)]
    width, lies = chunk.width, chunk.peeled
    whole = replace(chunk, mask=None, peeled=replace(lies, is_whole=True) if lies else None)
    if lies:
        lines(f"begin = {start} + ({start} < lowest).to(tl.int32) * {width}")
        within = f"tl.minimum({stop}, highest) - begin"
        lines(f"rest = begin + tl.maximum({within}, 0) // {width} * {width}")
        before = (start, f"tl.minimum(begin, {stop})", chunk)
        return [before, ("begin", "rest", whole), ("rest", stop, chunk)]
    if start == "0":
        rest = columns // width * width
        return [*([("0", str(rest), whole)] if rest else []), (str(rest), stop, chunk)]
    lines(f"rest = {start} + tl.maximum({stop} - {start}, 0) // {width} * {width}")
    return [(start, "rest", whole), ("rest", stop, chunk)]


def _walk(tile: Tile, part: Pass, counted: str, online: Mapping[int, int]) -> None:
    """One loop.  Names that are first used in it do not exist after it."""
    lines, (chunk,) = tile.lines, tile.chunks
    with lines.block(f"for first in {counted}:"):
        if chunk.peeled:
            every = f"tl.arange(0, {chunk.width})[None, :]"
            chunk.peeled.write_lanes(lines, tile.of.column_count, every)
        else:
            lines(f"c = first + tl.arange(0, {chunk.width})[None, :]")
            if chunk.mask:
                lines(f"inside = c < {tile.of.column_count}")
        tile.write(part.wide, part.wide_outputs)
        for index in part.running(part.reductions):
            if index not in online.values():
                _accumulate(tile, index, online.get(index))


def _accumulate(tile: Tile, index: int, total: int | None) -> None:
    """Take the columns of a turn into the running value of a reduction; ``total`` is the sum whose
    maximum it is, where both run together."""
    lines, (chunk,), how = tile.lines, tile.chunks, reduction(tile.graph[index])
    lines(f"# {tile.graph.describe(index)}")
    if total is None:
        lines(f"a{index} = {tile.accumulated(index, how, chunk)}")
    else:
        text, _ = tile.partial(index, how, chunk)
        lines(f"# {tile.graph.describe(total)}")
        lines(f"a{index}, a{total} = _online(a{index}, a{total}, {text})")


def _results(tile: Tile, part: Pass, reductions: Iterable[int], parts: int = 0) -> None:
    """The results of reductions from running values or, where there are ``parts``, partial results;
    those of pairs first."""
    wanted = set(reductions)
    for pair in part.online:
        _results_of(tile, pair, wanted.intersection(pair.members), parts)
        wanted.difference_update(pair.members)
    for index in sorted(wanted):
        how = reduction(tile.graph[index])
        tile.keep_reduced(index, how, _over(tile, how, f"a{index}", parts), rows=True)


def _results_of(tile: Tile, pair: Pair, wanted: Collection[int], parts: int) -> None:
    """Those members of a pair that are wanted; all from one maximum and one sum."""
    if not wanted:
        return
    how = reduction(tile.graph[pair.maximum])
    tile.keep_reduced(pair.maximum, how, _over(tile, how, f"a{pair.maximum}", parts), rows=True)
    highest, total = f"v{pair.maximum}", f"s{pair.total}"
    lanes = _below(pair, highest)
    tile.lines(f"{total} = {_over(tile, reduction(tile.graph[pair.total]), lanes, parts)}")
    for index in pair.members[1:]:
        if index in pair.maxima:
            text = highest
        elif index in pair.guarded:
            text = f'tl.where({highest} == float("inf"), float("inf"), {total})'
        else:
            text = f'tl.where({total} == 0.0, float("nan"), {total})'
        if index in wanted:
            tile.keep_reduced(index, reduction(tile.graph[index]), text, rows=True)


def _over(tile: Tile, how: Reduction, text: str, parts: int) -> str:
    """What a reduction comes to for each row, from a tensor of rows and ``parts`` (0: lanes)."""
    if parts and tile.rows.count == 1:
        return how.alone(f"tl.reshape({text}, ({parts},))")
    return how.along(text, 1)


def _below(pair: Pair, highest: str) -> str:
    """The running sums of a pair, relative to the maximum of all of them."""
    return f"_rescaled(a{pair.total}, a{pair.maximum}, {highest})"


def _load_partial(tile: Tile, index: int, parts: int) -> None:
    """The partial results that the kernel before has left."""
    tile.lines(f"# {tile.graph.describe(index)}")
    mask = f", mask={tile.rows.mask}" if tile.rows.mask else ""
    tile.lines(f"a{index} = tl.load(w{index} + r * {parts} + tl.arange(0, {parts})[None, :]{mask})")


def _store_partials(tile: Tile, part: Pass, parts: int) -> None:
    """What the kernel of a pass leaves to the next one, as its program number ``part`` found it."""
    texts = {
        index: reduction(tile.graph[index]).along(f"a{index}", 1)
        for index in part.running(part.reductions)
    }
    for pair in part.pairs:
        highest = f"s{pair.maximum}"
        tile.lines(f"{highest} = {texts[pair.maximum]}")
        total = reduction(tile.graph[pair.total]).along(_below(pair, highest), 1)
        texts |= {pair.maximum: highest, pair.total: total}
    mask = f", mask={tile.rows.mask}" if tile.rows.mask else ""
    for index, text in texts.items():
        tile.lines(f"tl.store(w{index} + r * {parts} + part, {text}{mask})")


def _used(of: Schedule, part: Pass) -> tuple[str, ...]:
    """What the kernel of a pass reads and writes."""
    mapping = of.mapping
    operators = [*part.wide, *part.narrow, *part.reductions]
    reads = mapping.read_by(operators)
    tensors = [*reads, *sorted([*part.wide_outputs, *part.narrow_outputs])]
    partial = sorted(part.running({*part.finished, *part.reductions}))
    return (*(f"p{i}" for i in tensors), *(f"w{i}" for i in partial))
