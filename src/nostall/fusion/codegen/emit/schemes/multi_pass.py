"""Emission of multi-pass kernels: the schemes ``looped`` and ``split``.

Rows do not stay in registers. Each level of reductions is a pass over the columns
(:mod:`~nostall.fusion.codegen.loops.reduction_levels`), and later passes compute their operands
again from memory. ``looped`` runs all passes in one kernel. ``split`` distributes a row over
several programs and launches a kernel for each pass. Its partial results go through memory, and
every program of the next kernel combines them in the same order, so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

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
    row_limit,
    specializes_counts,
    write_row_block,
    zero_condition,
)
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.reductions import Reduction
from nostall.fusion.codegen.expressions.templates import LARGEST_FLOAT, TRITON_DTYPES
from nostall.fusion.codegen.loops.dynamic_rows import has_dynamic_columns
from nostall.fusion.codegen.loops.online_reductions import OnlinePair, OnlineVariance
from nostall.fusion.codegen.loops.reduction_levels import Pass
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import loop_range
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.dynamic_size import Extent


@dataclass(frozen=True)
class Splits:
    """The programs that share a row: each has ``span`` lanes, up to lane ``end`` (expression)."""

    count: int
    span: int
    end: str
    first: str
    """Expression of the lane of the first column."""

    def write_element_counts(self, lines: Lines) -> None:
        """Define ``n``, the number of elements of each program, in fp32."""
        lines(f"begins = tl.arange(0, {self.count})[None, :] * {self.span}")
        within = f"tl.minimum(begins + {self.span}, {self.end}) - tl.maximum(begins, {self.first})"
        lines(f"n = tl.maximum({within}, 0).to(tl.float32)")


def write_looped(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``looped``; returns the number of programs."""
    schedule, plan = kernel.schedule, kernel.plan
    rows = write_row_block(kernel, lines, "pid")
    tile = _make_tile(kernel, rows, lines)
    end = _end_lane(kernel)
    for number, part in enumerate(kernel.facts.passes):
        lines(f"# pass {number}")
        write_row_operators(tile, part)
        if part.has_columns:
            # Every second pass begins with the columns that the pass before it read last: more of
            # them are still in the cache.
            backwards = number % 2 == 1 and not (plan.peeled or has_dynamic_columns(schedule))
            _write_column_loops(tile, part, "0", end, plan.async_copies, backwards=backwards)
            _write_results(tile, part, part.reductions)
    return Extent(schedule.row_count, plan.rows)


def emit_split(kernel: PlannedKernel) -> Program:
    """The program of the scheme ``split``: one kernel for each pass."""
    schedule, plan = kernel.schedule, kernel.plan
    facts, kernels = kernel.facts, []
    width, name, end = plan.chunks[0], kernel_name(kernel), _end_lane(kernel)
    # Whole iterations for each program: only the ends of a row need masks.
    span = -(-kernel.lanes_per_row // (width * plan.splits)) * width
    splits = Splits(plan.splits, span, end, "ahead" if plan.peeled else "0")
    for number, part in enumerate(facts.passes):
        lines = Lines()
        with lines.block():
            lines("pid = tl.program_id(0)")
            lines("part = tl.program_id(1)")
            rows = write_row_block(kernel, lines, "pid")
            tile = _make_tile(kernel, rows, lines)
            for index in part.finished_accumulators:
                _load_partial(tile, index, plan.splits)
            _write_results(tile, part, part.finished_reductions, splits)
            write_row_operators(tile, part, zero_condition("part"))
            if part.has_columns:
                lines(f"start = part * {span}")
                stop = f"tl.minimum(start + {span}, {end})"
                _write_column_loops(tile, part, "start", stop, plan.async_copies)
                _store_partials(tile, part, plan.splits)
        arguments = _pass_arguments(schedule, part)
        grid = (Extent(schedule.row_count, plan.rows), plan.splits if part.has_columns else 1)
        launch = Launch(
            f"{name}_{number}",
            arguments,
            (schedule.outer_row_count,),
            grid,
            plan.num_warps,
            specializes_counts(schedule),
        )
        kernels.append((lines, launch))
    partial = {i for part in facts.passes for i in part.accumulators}
    workspaces = tuple(
        Workspace(f"w{i}", facts.reductions[i].dtype, schedule.row_count * plan.splits)
        for i in schedule.body
        if i in partial
    )
    return assemble_program(kernel, kernels, workspaces)


def _end_lane(kernel: PlannedKernel) -> str:
    """The end of the columns, or of the lanes if rows are peeled (exclusive)."""
    columns = kernel.schedule.column_count
    return f"ahead + {columns}" if kernel.plan.peeled else str(columns)


def _make_tile(kernel: PlannedKernel, rows: Rows, lines: Lines) -> Tile:
    """The tile of one iteration over the columns; writes the bounds of peeled rows."""
    schedule, plan = kernel.schedule, kernel.plan
    width, peeling = plan.chunks[0], kernel.peeling
    if peeling:
        peeling.write_row_bounds(lines, schedule.column_count, row_limit(schedule))
    mask = "inside" if peeling or schedule.column_count % width else None
    chunk = Chunk(width, "c", mask, "", peeling)
    return Tile(kernel.facts, schedule.columns, rows, (chunk,), lines)


def write_row_operators(tile: Tile, part: Pass, store_condition: str | None = None) -> None:
    """Write the operators of a pass that have no columns, and their stores.

    Programs in which ``store_condition`` is false store nothing.
    """
    for index in part.row_operators:
        if (index, "") not in tile.values:
            tile.compute(index)
    for index in part.row_outputs:
        tile.store(index, store_condition)


def _write_column_loops(
    tile: Tile,
    part: Pass,
    start: str,
    stop: str,
    async_copies: bool,
    *,
    backwards: bool = False,
) -> None:
    """Write the loops over columns that accumulate the reductions of a pass and store its outputs.

    A program goes through lanes ``start`` to ``stop`` of its rows in up to three loops::

        start     begin                          rest      stop
          | masked  |   full iterations: no mask,  | masked  |
          | (peeled)|   asynchronous copies        |         |

    Only the loop in the middle is long, and a mask there would cost a comparison for each access
    and make Triton load element by element. ``backwards``: from the last columns to the first.
    """
    lines, (chunk,) = tile.lines, tile.chunks
    sums_by_maximum = {pair.first_maximum: pair.first_sum for pair in part.reduced_pairs}
    # One accumulator a lane, and not one a row: threads exchange values once, after the loops.
    for index in part.accumulators:
        reduction = tile.facts.reductions[index]
        shape = f"({tile.rows.count}, {chunk.width})"
        # An online sum is rescaled by exp(old - new maximum): with -inf as the first maximum, a
        # lane that has met only -inf would compute exp(-inf - -inf), which is NaN.
        initial = repr(-LARGEST_FLOAT) if index in sums_by_maximum else reduction.neutral
        lines(f"a{index} = tl.full({shape}, {initial}, {TRITON_DTYPES[reduction.dtype]})")
    if part.reduced_variances:
        lines(f"n = tl.full((1, {chunk.width}), 0, tl.float32)  # elements of each lane")
    ranges = _loop_ranges(tile, start, stop)
    for begin, end, loop_chunk in reversed(ranges) if backwards else ranges:
        # The loops at the ends have an iteration or two: there is nothing to copy in advance.
        iterations = loop_range(begin, end, chunk.width, async_copies and loop_chunk.mask is None)
        first = _mirrored(begin, end, chunk.width) if backwards else "at"
        _write_loop(tile.with_chunk(loop_chunk), part, iterations, first, sums_by_maximum)
    # A lane whose sum is still 0 has met no element above -inf: restore the true maximum.
    for maximum, total in sums_by_maximum.items():
        lines(f'a{maximum} = tl.where(a{total} == 0.0, float("-inf"), a{maximum})')


def _loop_ranges(tile: Tile, start: str, stop: str) -> list[tuple[str, str, Chunk]]:
    """The begin, the end and the chunk of each loop over columns; writes the lines they need."""
    lines, (chunk,), columns = tile.lines, tile.chunks, tile.schedule.column_count
    if chunk.mask is None:
        return [(start, stop, chunk)]
    width, peeling = chunk.width, chunk.peeling
    interior = replace(peeling, is_interior=True) if peeling else None
    full = replace(chunk, mask=None, peeling=interior)
    if peeling:
        lines(f"begin = {start} + ({start} < lowest).to(tl.int32) * {width}")
        within = f"tl.minimum({stop}, highest) - begin"
        lines(f"rest = begin + tl.maximum({within}, 0) // {width} * {width}")
        before = (start, f"tl.minimum(begin, {stop})", chunk)
        return [before, ("begin", "rest", full), ("rest", stop, chunk)]
    if start == "0" and has_dynamic_columns(tile.schedule):
        lines(f"rest = {columns} // {width} * {width}")
        return [(start, "rest", full), ("rest", stop, chunk)]
    if start == "0":
        rest = columns // width * width
        return [*([("0", str(rest), full)] if rest else []), (str(rest), stop, chunk)]
    lines(f"rest = {start} + tl.maximum({stop} - {start}, 0) // {width} * {width}")
    return [(start, "rest", full), ("rest", stop, chunk)]


def _mirrored(begin: str, end: str, width: int) -> str:
    """The first column of an iteration at ``at`` of a loop that runs backwards."""
    iterations = -(-(int(end) - int(begin)) // width)
    return f"{2 * int(begin) + (iterations - 1) * width} - at"


def _write_loop(
    tile: Tile, part: Pass, iterations: str, first: str, sums_by_maximum: Mapping[int, int]
) -> None:
    """Write one loop over columns. Names that are first used in it do not exist after it.

    ``first``: the first column of an iteration, from the loop variable ``at``.
    """
    lines, (chunk,) = tile.lines, tile.chunks
    variable = "first" if first == "at" else "at"
    with lines.block(f"for {variable} in {iterations}:"):
        if variable == "at":
            lines(f"first = {first}")
        if chunk.peeling:
            lanes = f"tl.arange(0, {chunk.width})[None, :]"
            chunk.peeling.write_lane_indices(lines, tile.schedule.column_count, lanes)
        else:
            lines(f"c = first + tl.arange(0, {chunk.width})[None, :]")
            if chunk.mask:
                lines(f"inside = c < {tile.schedule.column_count}")
        tile.write(part.column_operators, part.column_outputs)
        squares = {variance.squares: variance for variance in part.reduced_variances}
        for index in part.accumulators:
            if index not in sums_by_maximum.values() and index not in squares:
                _accumulate(tile, index, sums_by_maximum.get(index))
        if squares:
            lines(f"n += {f'{chunk.mask}.to(tl.float32)' if chunk.mask else '1.0'}")
        for variance in squares.values():
            _accumulate_squares(tile, variance)


def _accumulate(tile: Tile, index: int, total: int | None) -> None:
    """Combine the accumulator of a reduction with the columns of an iteration.

    ``total``: the exponential sum that is accumulated together with this maximum (online softmax,
    arXiv:1805.02867); None for other reductions.
    """
    lines, (chunk,), reduction = tile.lines, tile.chunks, tile.facts.reductions[index]
    lines(f"# {tile.graph.describe(index)}")
    if total is None:
        lines(f"a{index} = {tile.accumulate(index, reduction, chunk)}")
    else:
        text, _ = tile.partial_result(index, reduction, chunk)
        lines(f"# {tile.graph.describe(total)}")
        lines(f"a{index}, a{total} = _online(a{index}, a{total}, {text})")


def _accumulate_squares(tile: Tile, variance: OnlineVariance) -> None:
    """Update the sum of (x - mean)^2 with the columns of an iteration; the sum of x has them."""
    (chunk,), squares = tile.chunks, f"a{variance.squares}"
    x, _ = tile.partial_result(variance.total, tile.facts.reductions[variance.total], chunk)
    tile.lines(f"# {tile.graph.describe(variance.squares)}")
    updated = f"_spread({squares}, a{variance.total}, {x}, n)"
    if chunk.mask:
        updated = f"tl.where({chunk.mask}, {updated}, {squares})"
    tile.lines(f"{squares} = {updated}")


def _write_results(
    tile: Tile, part: Pass, reductions: Iterable[int], parts: Splits | None = None
) -> None:
    """Write the results of reductions, pairs that share a loop first.

    ``parts``: the programs that share a row; None if the accumulators hold one value a lane.
    """
    splits = parts.count if parts else 0
    remaining = set(reductions)
    for pair in part.online_pairs:
        _write_pair_results(tile, pair, remaining.intersection(pair.members), splits)
        remaining.difference_update(pair.members)
    variances = [v for v in part.online_variances if v.squares in remaining]
    if parts and variances:
        parts.write_element_counts(tile.lines)
    for variance in variances:
        _write_squares(tile, variance, splits)
        remaining.discard(variance.squares)
    for index in sorted(remaining):
        reduction = tile.facts.reductions[index]
        text = _reduce(tile, reduction, f"a{index}", splits)
        tile.write_reduction_result(index, reduction, text, has_rows=True)


def _write_pair_results(
    tile: Tile, pair: OnlinePair, members: Collection[int], splits: int
) -> None:
    """Write the results of some members of a pair, all from its one maximum and its one sum."""
    if not members:
        return
    reductions = tile.facts.reductions
    reduction = reductions[pair.first_maximum]
    text = _reduce(tile, reduction, f"a{pair.first_maximum}", splits)
    tile.write_reduction_result(pair.first_maximum, reduction, text, has_rows=True)
    maximum, total = f"v{pair.first_maximum}", f"s{pair.first_sum}"
    reduction = reductions[pair.first_sum]
    tile.lines(f"{total} = {_reduce(tile, reduction, _rescaled_sum(pair, maximum), splits)}")
    for index in pair.members[1:]:
        if index in pair.maxima:
            text = maximum
        elif index in pair.guarded_sums:
            text = f'tl.where({maximum} == float("inf"), float("inf"), {total})'
        else:
            text = f'tl.where({total} == 0.0, float("nan"), {total})'
        if index in members:
            tile.write_reduction_result(index, reductions[index], text, has_rows=True)


def _write_squares(tile: Tile, variance: OnlineVariance, splits: int) -> None:
    """Write the sum of (x - mean)^2 of a row; ``n`` has the elements of each lane or split."""
    total, squares = (tile.facts.reductions[i] for i in (variance.total, variance.squares))
    mean, count = f"s{variance.squares}", tile.schedule.column_count
    tile.lines(f"{mean} = {_reduce(tile, total, f'a{variance.total}', splits)} / {float(count)!r}")
    text = _reduce(tile, squares, _apart(variance, mean), splits)
    tile.write_reduction_result(variance.squares, squares, text, has_rows=True)


def _apart(variance: OnlineVariance, mean: str) -> str:
    """The squared differences of each lane or split from ``mean`` instead of its own mean."""
    return f"_apart(a{variance.squares}, a{variance.total}, n, {mean})"


def _reduce(tile: Tile, reduction: Reduction, text: str, splits: int) -> str:
    """The result of a reduction for each row, from (rows, splits), or (rows, lanes) if 0 splits."""
    if splits and tile.rows.count == 1:
        return reduction.reduce_all(f"tl.reshape({text}, ({splits},))")
    return reduction.reduce(text, 1)


def _rescaled_sum(pair: OnlinePair, maximum: str) -> str:
    """The accumulated sums of a pair, rescaled to the ``maximum`` of all lanes or splits."""
    return f"_rescaled(a{pair.first_sum}, a{pair.first_maximum}, {maximum})"


def _load_partial(tile: Tile, index: int, splits: int) -> None:
    """Load the partial results of a reduction that the previous kernel stored."""
    tile.lines(f"# {tile.graph.describe(index)}")
    mask = f", mask={tile.rows.mask}" if tile.rows.mask else ""
    offset = f"r * {splits} + tl.arange(0, {splits})[None, :]"
    tile.lines(f"a{index} = tl.load(w{index} + {offset}{mask})")


def _store_partials(tile: Tile, part: Pass, splits: int) -> None:
    """Store the partial results of a pass for the next kernel, at the program's split number."""
    reductions = tile.facts.reductions
    texts = {index: reductions[index].reduce(f"a{index}", 1) for index in part.accumulators}
    for pair in part.reduced_pairs:
        maximum = f"s{pair.first_maximum}"
        tile.lines(f"{maximum} = {texts[pair.first_maximum]}")
        total = reductions[pair.first_sum].reduce(_rescaled_sum(pair, maximum), 1)
        texts |= {pair.first_maximum: maximum, pair.first_sum: total}
    for variance in part.reduced_variances:
        mean = f"s{variance.squares}"
        tile.lines(
            f"{mean} = {texts[variance.total]} / tl.maximum(tl.sum(n, 1, keep_dims=True), 1)"
        )
        squares = reductions[variance.squares].reduce(_apart(variance, mean), 1)
        texts[variance.squares] = squares
    mask = f", mask={tile.rows.mask}" if tile.rows.mask else ""
    for index, text in texts.items():
        tile.lines(f"tl.store(w{index} + r * {splits} + part, {text}{mask})")


def _pass_arguments(schedule: Schedule, part: Pass) -> tuple[str, ...]:
    """The tensors and workspaces that the kernel of a pass accesses, as argument names."""
    mapping = schedule.mapping
    operators = [*part.column_operators, *part.row_operators, *part.reductions]
    reads = mapping.inputs_of(operators)
    tensors = [*reads, *sorted([*part.column_outputs, *part.row_outputs])]
    partial = sorted({*part.finished_accumulators, *part.accumulators})
    return (*(f"p{i}" for i in tensors), *(f"w{i}" for i in partial))
