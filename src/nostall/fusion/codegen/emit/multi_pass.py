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

from nostall.fusion.codegen.emit.program import (
    Launch,
    Program,
    Workspace,
    assemble_program,
    kernel_name,
)
from nostall.fusion.codegen.emit.prologue import (
    row_limit,
    specializes_counts,
    write_row_block,
    zero_condition,
)
from nostall.fusion.codegen.emit.tile import Chunk, Rows, Tile
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import (
    LARGEST_FLOAT,
    TRITON_DTYPES,
    Reduction,
    make_reduction,
)
from nostall.fusion.codegen.loops.online_softmax import OnlinePair
from nostall.fusion.codegen.loops.reduction_levels import Pass, passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import loop_range
from nostall.fusion.codegen.tiling.loop_peeling import find_peeling, lanes_per_row
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.dynamic_size import Extent


def write_looped(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``looped``; returns the number of programs."""
    schedule, plan = kernel.schedule, kernel.plan
    rows = write_row_block(kernel, lines, "pid")
    tile = _make_tile(kernel, rows, lines)
    for number, part in enumerate(passes(schedule)):
        lines(f"# pass {number}")
        write_row_operators(tile, part)
        if part.has_columns:
            _write_column_loops(tile, part, "0", _end_lane(kernel), plan.async_copies)
            _write_results(tile, part, part.reductions)
    return Extent(schedule.row_count, plan.rows)


def emit_split(kernel: PlannedKernel) -> Program:
    """The program of the scheme ``split``: one kernel for each level of reductions."""
    schedule, plan = kernel.schedule, kernel.plan
    kernels = []
    graph = schedule.mapping.graph
    width = plan.chunks[0]
    span = -(-lanes_per_row(schedule, plan.peeled) // (width * plan.splits)) * width
    name = kernel_name(kernel)
    for number, part in enumerate(passes(schedule)):
        lines = Lines()
        with lines.block():
            lines("pid = tl.program_id(0)")
            lines("part = tl.program_id(1)")
            rows = write_row_block(kernel, lines, "pid")
            tile = _make_tile(kernel, rows, lines)
            for index in part.accumulators(part.finished_reductions):
                _load_partial(tile, index, plan.splits)
            _write_results(tile, part, part.finished_reductions, plan.splits)
            write_row_operators(tile, part, only=zero_condition("part"))
            if part.has_columns:
                lines(f"start = part * {span}")
                stop = f"tl.minimum(start + {span}, {_end_lane(kernel)})"
                _write_column_loops(tile, part, "start", stop, plan.async_copies)
                _store_partials(tile, part, plan.splits)
        arguments = _pass_arguments(schedule, part)
        grid = (Extent(schedule.row_count, plan.rows), plan.splits if part.has_columns else 1)
        told = f"{name}_{number}", arguments, (schedule.outer_row_count,), grid, plan.num_warps
        launch = Launch(*told, specializes_counts(schedule))
        kernels.append((lines, launch))
    partial = {i for part in passes(schedule) for i in part.accumulators(part.reductions)}
    workspaces = tuple(
        Workspace(f"w{i}", make_reduction(graph[i]).dtype, schedule.row_count * plan.splits)
        for i in schedule.body
        if i in partial
    )
    return assemble_program(kernel, kernels, workspaces)


def _end_lane(kernel: PlannedKernel) -> str:
    """The first column, or lane, that is none."""
    columns = kernel.schedule.column_count
    return f"ahead + {columns}" if kernel.plan.peeled else str(columns)


def _make_tile(kernel: PlannedKernel, rows: Rows, lines: Lines) -> Tile:
    schedule, plan = kernel.schedule, kernel.plan
    width, lies = plan.chunks[0], find_peeling(schedule) if plan.peeled else None
    if lies:
        lies.write_row_bounds(lines, schedule.column_count, row_limit(schedule))
    chunk = Chunk(width, "c", "inside" if lies or schedule.column_count % width else None, "", lies)
    return Tile(schedule, schedule.columns, rows, (chunk,), lines)


def write_row_operators(tile: Tile, part: Pass, only: str | None = None) -> None:
    """The operators of a pass that have no columns, and their stores."""
    for index in part.row_operators:
        if (index, "") not in tile.values:
            tile.compute(index)
    for index in part.row_outputs:
        tile.store(index, only)


def _write_column_loops(tile: Tile, part: Pass, start: str, stop: str, ahead: bool) -> None:
    """Loops over columns that accumulate the reductions of a pass and store its outputs: turns of
    which every lane exists, which may be copied ``ahead``, and what is before and behind them."""
    lines, (chunk,) = tile.lines, tile.chunks
    online = {pair.first_maximum: pair.first_sum for pair in part.reduced_pairs}
    for index in part.accumulators(part.reductions):
        how = make_reduction(tile.graph[index])
        shape = f"({tile.rows.count}, {chunk.width})"
        # The difference of -inf with itself would be NaN.
        begin = repr(-LARGEST_FLOAT) if index in online else how.neutral
        lines(f"a{index} = tl.full({shape}, {begin}, {TRITON_DTYPES[how.dtype]})")
    for first, last, some in _loop_ranges(tile, start, stop):
        counted = loop_range(first, last, chunk.width, ahead and some.mask is None)
        _write_loop(tile.with_chunk(some), part, counted, online)
    for index, total in online.items():
        lines(f'a{index} = tl.where(a{total} == 0.0, float("-inf"), a{index})')


def _loop_ranges(tile: Tile, start: str, stop: str) -> list[tuple[str, str, Chunk]]:
    """Where the turns of each loop begin and end, and their lanes."""
    lines, (chunk,), columns = tile.lines, tile.chunks, tile.schedule.column_count
    if chunk.mask is None:
        return [(start, stop, chunk)]
    width, lies = chunk.width, chunk.peeling
    whole = replace(chunk, mask=None, peeling=replace(lies, is_interior=True) if lies else None)
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


def _write_loop(tile: Tile, part: Pass, counted: str, online: Mapping[int, int]) -> None:
    """One loop.  Names that are first used in it do not exist after it."""
    lines, (chunk,) = tile.lines, tile.chunks
    with lines.block(f"for first in {counted}:"):
        if chunk.peeling:
            every = f"tl.arange(0, {chunk.width})[None, :]"
            chunk.peeling.write_lane_indices(lines, tile.schedule.column_count, every)
        else:
            lines(f"c = first + tl.arange(0, {chunk.width})[None, :]")
            if chunk.mask:
                lines(f"inside = c < {tile.schedule.column_count}")
        tile.write(part.column_operators, part.column_outputs)
        for index in part.accumulators(part.reductions):
            if index not in online.values():
                _accumulate(tile, index, online.get(index))


def _accumulate(tile: Tile, index: int, total: int | None) -> None:
    """Take the columns of a turn into the running value of a reduction; ``total`` is the sum whose
    maximum it is, where both run together."""
    lines, (chunk,), how = tile.lines, tile.chunks, make_reduction(tile.graph[index])
    lines(f"# {tile.graph.describe(index)}")
    if total is None:
        lines(f"a{index} = {tile.accumulate(index, how, chunk)}")
    else:
        text, _ = tile.partial_result(index, how, chunk)
        lines(f"# {tile.graph.describe(total)}")
        lines(f"a{index}, a{total} = _online(a{index}, a{total}, {text})")


def _write_results(tile: Tile, part: Pass, reductions: Iterable[int], parts: int = 0) -> None:
    """The results of reductions from running values or, where there are ``parts``, partial results;
    those of pairs first."""
    wanted = set(reductions)
    for pair in part.online_pairs:
        _write_pair_results(tile, pair, wanted.intersection(pair.members), parts)
        wanted.difference_update(pair.members)
    for index in sorted(wanted):
        how = make_reduction(tile.graph[index])
        tile.write_reduced(index, how, _reduce(tile, how, f"a{index}", parts), rows=True)


def _write_pair_results(tile: Tile, pair: OnlinePair, wanted: Collection[int], parts: int) -> None:
    """Those members of a pair that are wanted; all from one maximum and one sum."""
    if not wanted:
        return
    how = make_reduction(tile.graph[pair.first_maximum])
    tile.write_reduced(
        pair.first_maximum, how, _reduce(tile, how, f"a{pair.first_maximum}", parts), rows=True
    )
    highest, total = f"v{pair.first_maximum}", f"s{pair.first_sum}"
    lanes = _rescaled_sum(pair, highest)
    tile.lines(
        f"{total} = {_reduce(tile, make_reduction(tile.graph[pair.first_sum]), lanes, parts)}"
    )
    for index in pair.members[1:]:
        if index in pair.maxima:
            text = highest
        elif index in pair.guarded_sums:
            text = f'tl.where({highest} == float("inf"), float("inf"), {total})'
        else:
            text = f'tl.where({total} == 0.0, float("nan"), {total})'
        if index in wanted:
            tile.write_reduced(index, make_reduction(tile.graph[index]), text, rows=True)


def _reduce(tile: Tile, how: Reduction, text: str, parts: int) -> str:
    """What a reduction comes to for each row, from a tensor of rows and ``parts`` (0: lanes)."""
    if parts and tile.rows.count == 1:
        return how.reduce_all(f"tl.reshape({text}, ({parts},))")
    return how.reduce(text, 1)


def _rescaled_sum(pair: OnlinePair, highest: str) -> str:
    """The running sums of a pair, relative to the maximum of all of them."""
    return f"_rescaled(a{pair.first_sum}, a{pair.first_maximum}, {highest})"


def _load_partial(tile: Tile, index: int, parts: int) -> None:
    """The partial results that the kernel before has left."""
    tile.lines(f"# {tile.graph.describe(index)}")
    mask = f", mask={tile.rows.mask}" if tile.rows.mask else ""
    tile.lines(f"a{index} = tl.load(w{index} + r * {parts} + tl.arange(0, {parts})[None, :]{mask})")


def _store_partials(tile: Tile, part: Pass, parts: int) -> None:
    """What the kernel of a pass leaves to the next one, as its program number ``part`` found it."""
    texts = {
        index: make_reduction(tile.graph[index]).reduce(f"a{index}", 1)
        for index in part.accumulators(part.reductions)
    }
    for pair in part.reduced_pairs:
        highest = f"s{pair.first_maximum}"
        tile.lines(f"{highest} = {texts[pair.first_maximum]}")
        total = make_reduction(tile.graph[pair.first_sum]).reduce(_rescaled_sum(pair, highest), 1)
        texts |= {pair.first_maximum: highest, pair.first_sum: total}
    mask = f", mask={tile.rows.mask}" if tile.rows.mask else ""
    for index, text in texts.items():
        tile.lines(f"tl.store(w{index} + r * {parts} + part, {text}{mask})")


def _pass_arguments(schedule: Schedule, part: Pass) -> tuple[str, ...]:
    """What the kernel of a pass reads and writes."""
    mapping = schedule.mapping
    operators = [*part.column_operators, *part.row_operators, *part.reductions]
    reads = mapping.inputs_of(operators)
    tensors = [*reads, *sorted([*part.column_outputs, *part.row_outputs])]
    partial = sorted(part.accumulators({*part.finished_reductions, *part.reductions}))
    return (*(f"p{i}" for i in tensors), *(f"w{i}" for i in partial))
