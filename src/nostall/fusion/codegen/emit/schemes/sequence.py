"""Kernel bodies that loop over the positions of a sequence, tile by tile: the scheme ``turned``.

They compute small dots with vectors (:mod:`~nostall.fusion.codegen.tiling.sequence_tiles`). Full
tiles are a loop without masks; the remaining positions are one more tile with masks, behind the
loop. Each lane accumulates its part of a reduction over positions, and the lanes are reduced once,
after the last tile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nostall.fusion.codegen.emit.schemes.dots import Axes, MatrixValue, MatrixWriter
from nostall.fusion.codegen.emit.tile_parts import write_row_block
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import LARGEST_FLOAT, TRITON_DTYPES, Value
from nostall.fusion.codegen.loops.dot_axes import find_groups
from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.sequence_tiles import SequenceTiling, has_positions
from nostall.fusion.graph.dynamic_size import Extent


def write_sequence(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``turned``; returns the number of programs."""
    schedule, tiling, width = kernel.schedule, kernel.sequence_tiling, kernel.positions_per_tile
    count = schedule.count(schedule.loop_groups[tiling.group])
    write_row_block(kernel, lines, "pid")
    load_lines, before_loop, after_loop = Lines(), Lines(), Lines()
    outer = MatrixWriter(kernel.facts, load_lines, before_loop)
    _write_operators(outer, tiling.before_loop)
    loop_end = count // width * width
    tiles = [_SequenceTile(outer, tiling, width, "first")]
    if loop_end < count:
        tiles.append(_SequenceTile(outer, tiling, width, str(loop_end), count))
    for tile in tiles:
        _write_operators(tile, tiling.in_loop, accumulated=tiling.accumulated)
    outer.lines = after_loop
    _write_results(outer, tiles[0])
    _write_operators(outer, tiling.after_loop)
    lines.add(load_lines)
    lines.add(before_loop)
    tiles[0].write_accumulators(lines)
    with lines.block(f"for first in range(0, {loop_end}, {width}):"):
        tiles[0].write(lines)
    for tile in tiles[1:]:
        tile.write(lines)
    lines.add(after_loop)
    return Extent(schedule.row_count)


def _write_operators(
    writer: MatrixWriter, operators: Iterable[int], accumulated: Collection[int] = ()
) -> None:
    """Write operators and the stores of outputs; ``accumulated`` ones have no result yet."""
    for index in operators:
        writer.lines(f"# {writer.graph.describe(index)}")
        writer.compute(index)
        if index in writer.mapping.outputs and index not in accumulated:
            writer.store(index)


class _SequenceTile(MatrixWriter):
    """Writes the lines of one tile of ``width`` positions that begins at position ``start``.

    ``outer`` writes the values that do not depend on the position. ``position_count`` is the length
    of the sequence if some lanes of the tile are behind its end, else None.

    In a tile the maximum of a softmax is the running maximum of each lane, and values computed from
    it are relative to that maximum (online softmax, arXiv:1805.02867).
    """

    def __init__(
        self,
        outer: MatrixWriter,
        tiling: SequenceTiling,
        width: int,
        start: str,
        position_count: int | None = None,
    ) -> None:
        super().__init__(outer.facts, Lines(), Lines())
        self.outer, self.tiling = outer, tiling
        self.start, self.position_count = start, position_count
        # Shared, so that loads with and without positions get different names.
        self._load_counts = outer._load_counts
        self.lane_counts = tuple(
            width if group == tiling.group else lanes
            for group, lanes in enumerate(outer.lane_counts)
        )
        self.values = dict(outer.values)
        self.accumulator_axes: dict[int, Axes] = {}

    def write(self, lines: Lines) -> None:
        """Append the lines of this tile to ``lines``."""
        lines.add(self.load_lines)
        lines.add(self.lines)

    def write_accumulators(self, lines: Lines) -> None:
        """Initialize the accumulators of all lanes."""
        for index, axes in self.accumulator_axes.items():
            reduction = self.facts.reductions[index]
            is_maximum = index in self.tiling.softmax_sums
            # Not -inf, because -inf - -inf is NaN.
            initial = repr(-LARGEST_FLOAT) if is_maximum else reduction.neutral
            shape = ", ".join("1" if at is None else str(self.lane_counts[at]) for at in axes)
            lines(f"a{index} = tl.full(({shape}), {initial}, {TRITON_DTYPES[reduction.dtype]})")

    def compute(self, index: int) -> None:
        if index in self.tiling.accumulated:
            self._accumulate(index)
        elif index in self.tiling.pass_through:
            self.values[index] = self.values[self.mapping.operands[index][0].source]
        else:
            super().compute(index)

    def _accumulate(self, index: int) -> None:
        """Combine the accumulators of a reduction with the values of this tile."""
        reduction, lines = self.facts.reductions[index], self.lines
        accumulator = f"a{index}"
        if self.graph[index].kind == "dot":
            operand = self._products(index, self.tiling.group)
        else:
            operand = self._reduction_operand(index)
        text, self.accumulator_axes[index] = operand.value.text, operand.axes
        if index in self.tiling.softmax_sums:
            lines(f"v{index} = {reduction.combine(accumulator, text)}")
            lines(f"s{index} = libdevice.fast_expf(libdevice.sub_rn({accumulator}, v{index}))")
            lines(f"{accumulator} = v{index}")
            self.values[index] = MatrixValue(Value(f"v{index}", "float32"), operand.axes)
        elif index in self.tiling.scaled_by:
            lines(f"{accumulator} = {accumulator} * {self.scale(index)} + {text}")
        else:
            lines(f"{accumulator} = {reduction.combine(accumulator, text)}")

    def scale(self, index: int) -> str:
        """The factor that rescales the lanes of a sum after its running maximum has changed."""
        maximum = self.tiling.scaled_by[index]
        axes = zip(self.accumulator_axes[maximum], self.accumulator_axes[index], strict=True)
        is_aligned = all(group in (None, sum_group) for group, sum_group in axes)
        return f"s{maximum}" if is_aligned else f"tl.trans(s{maximum})"

    def _operand_value(self, operand: Operand, axes: Axes) -> MatrixValue:
        is_constant = self.graph[operand.source].kind == "constant"
        is_outer = operand.source in self.outer.values or self.mapping.is_in_memory(operand)
        group = self.tiling.group
        if is_outer and not is_constant and not has_positions(self.schedule, group, operand):
            return self.outer._operand_value(operand, axes)
        return super()._operand_value(operand, axes)

    def _counter(self, group: int, axis: int) -> str:
        if group != self.tiling.group:
            return self.outer._counter(group, axis)
        name = f"{'ij'[axis]}{group}"
        if (group, axis) not in self._masks:
            shape = ("[:, None]", "[None, :]")[axis]
            lanes = f"tl.arange(0, {self.lane_counts[group]}){shape}"
            self.load_lines(f"{name} = {self.start} + {lanes}")
            mask = f"in_{name}" if self.position_count else None
            if mask:
                self.load_lines(f"{mask} = {name} < {self.position_count}")
            self._masks[group, axis] = mask
        return name

    def _mask(self, group: int, axis: int) -> str | None:
        if group != self.tiling.group:
            return self.outer._mask(group, axis)
        return super()._mask(group, axis)


def _write_results(outer: MatrixWriter, tile: _SequenceTile) -> None:
    """Reduce the accumulators of all lanes; the maxima of softmaxes and their sums first."""
    tiling, lines = tile.tiling, outer.lines
    for maximum, total in tiling.softmax_sums.items():
        lines(f"# {outer.graph.describe(maximum)}")
        _write_result(outer, tile, maximum, f"a{maximum}")
        lines(f"s{maximum} = libdevice.fast_expf(libdevice.sub_rn(a{maximum}, v{maximum}))")
        lines(f"# {outer.graph.describe(total)}")
        _write_result(outer, tile, total, f"a{total} * {tile.scale(total)}")
        # The position of the maximum adds 1 to the sum, so the sum is 0 only if all are -inf.
        lines(f'v{maximum} = tl.where(v{total} == 0.0, float("-inf"), v{maximum})')
        lines(f'v{total} = tl.where(v{total} == 0.0, float("nan"), v{total})')
    for index in tiling.accumulated:
        if index not in tiling.softmax_sums and index not in tiling.softmax_sums.values():
            lines(f"# {outer.graph.describe(index)}")
            _write_result(outer, tile, index, _rescaled_accumulator(tile, index))
            if index in tiling.scaled_by:
                _apply_softmax_sum(outer, tile, index)
    for index in tiling.accumulated:
        if index in outer.mapping.outputs:
            outer.store(index)


def _rescaled_accumulator(tile: _SequenceTile, index: int) -> str:
    return f"a{index} * {tile.scale(index)}" if index in tile.tiling.scaled_by else f"a{index}"


def _write_result(outer: MatrixWriter, tile: _SequenceTile, index: int, text: str) -> None:
    """Reduce one accumulator, whose lanes are ``text``, to the result of its reduction."""
    reduction, axes = outer.facts.reductions[index], list(tile.accumulator_axes[index])
    removed = find_groups(outer.mapping.reduced_loops[index], outer.schedule.loop_groups)
    for axis, group in enumerate(tile.accumulator_axes[index]):
        if group in removed:
            text, axes[axis] = reduction.reduce(text, axis), None
    value = reduction.from_partial(text)
    outer.lines(f"v{index} = {value.text}")
    outer.values[index] = MatrixValue(Value(f"v{index}", value.dtype), (axes[0], axes[1]))


def _apply_softmax_sum(outer: MatrixWriter, tile: _SequenceTile, index: int) -> None:
    """Divide the result of a weighted sum by the sum of the softmax, if the graph divides it.

    Else the result becomes NaN if the sum is NaN: without a finite maximum, no sum of products with
    exponentials is a number.
    """
    result, total = outer.values[index], tile.tiling.softmax_sums[tile.tiling.scaled_by[index]]
    divisor = outer._operand_value(Operand(total), result.axes).value.text
    if index in tile.tiling.needs_division:
        outer.lines(f"v{index} = v{index} * (1.0 / {divisor})")
    else:
        outer.lines(f'v{index} = tl.where({divisor} != {divisor}, float("nan"), v{index})')
