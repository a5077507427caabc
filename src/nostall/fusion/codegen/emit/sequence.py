"""The body of a kernel that takes small dots with vectors by turns of a few places (``turns``).

Whole turns are a loop without masks, what is left is one more turn behind it.  What removes places
is kept for each lane and put together once, at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nostall.fusion.codegen.emit.dots import Axes, MatrixValue, MatrixWriter
from nostall.fusion.codegen.emit.prologue import write_row_block
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import (
    LARGEST_FLOAT,
    TRITON_DTYPES,
    Reduction,
    Value,
    make_reduction,
)
from nostall.fusion.codegen.loops.dot_axes import find_groups
from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.sequence_tiles import SequenceTiling, has_positions
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.graph import Node


def write_sequence(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``turned``; returns the number of programs."""
    schedule, found, places = kernel.schedule, kernel.sequence_tiling, kernel.positions_per_tile
    count = schedule.count(schedule.loop_groups[found.group])
    write_row_block(kernel, lines, "pid")
    reading, before, after = Lines(), Lines(), Lines()
    around = MatrixWriter(schedule, reading, before)
    _write_operators(around, found.before_loop)
    whole = count // places * places
    turns = [_SequenceTile(around, found, places, "first")]
    if whole < count:
        turns.append(_SequenceTile(around, found, places, str(whole), count))
    for turn in turns:
        _write_operators(turn, found.in_loop, ends_later=found.accumulated)
    around.lines = after
    _write_results(around, turns[0])
    _write_operators(around, found.after_loop)
    lines.add(reading)
    lines.add(before)
    turns[0].write_accumulators(lines)
    with lines.block(f"for first in range(0, {whole}, {places}):"):
        turns[0].write(lines)
    for turn in turns[1:]:
        turn.write(lines)
    lines.add(after)
    return Extent(schedule.row_count)


def _write_operators(
    matrices: MatrixWriter, operators: Iterable[int], ends_later: Collection[int] = ()
) -> None:
    for index in operators:
        matrices.lines(f"# {matrices.graph.describe(index)}")
        matrices.compute(index)
        if index in matrices.mapping.outputs and index not in ends_later:
            matrices.store(index)


class _SequenceTile(MatrixWriter):
    """Writes one turn, from the place ``first`` on; ``position_count``: where some of its lanes have no
    place, how many places there are.  What has no places is ``outer``.

    A maximum that powers run along with is in a turn the running one of each lane, so what is
    computed from it is in units of that.
    """

    def __init__(
        self,
        around: MatrixWriter,
        found: SequenceTiling,
        places: int,
        first: str,
        count: int | None = None,
    ) -> None:
        super().__init__(around.schedule, Lines(), Lines())
        self.outer, self.tiling, self.first, self.position_count = around, found, first, count
        # What is read with places and without has two names.
        self._load_counts = around._load_counts
        widths = enumerate(around.lane_counts)
        self.lane_counts = tuple(places if at == found.group else lanes for at, lanes in widths)
        self.values = dict(around.values)
        self.accumulator_axes: dict[int, Axes] = {}

    def write(self, lines: Lines) -> None:
        lines.add(self.load_lines)
        lines.add(self.lines)

    def write_accumulators(self, lines: Lines) -> None:
        """What the lanes hold before the first turn."""
        for index, axes in self.accumulator_axes.items():
            how = dot_or_reduction(self.graph[index])
            # The difference of -inf with itself would be NaN.
            begin = repr(-LARGEST_FLOAT) if index in self.tiling.softmax_sums else how.neutral
            shape = ", ".join("1" if at is None else str(self.lane_counts[at]) for at in axes)
            lines(f"a{index} = tl.full(({shape}), {begin}, {TRITON_DTYPES[how.dtype]})")

    def compute(self, index: int) -> None:
        if index in self.tiling.accumulated:
            self._accumulate(index)
        elif index in self.tiling.pass_through:
            self.values[index] = self.values[self.mapping.operands[index][0].source]
        else:
            super().compute(index)

    def _accumulate(self, index: int) -> None:
        """Take a turn into what each lane holds of a reduction."""
        how, lines, held = dot_or_reduction(self.graph[index]), self.lines, f"a{index}"
        if self.graph[index].kind == "dot":
            taken = self._products(index, self.tiling.group)
        else:
            taken = self._reduction_operand(index)
        text, self.accumulator_axes[index] = taken.value.text, taken.axes
        if index in self.tiling.softmax_sums:
            lines(f"v{index} = {how.combine(held, text)}")
            lines(f"s{index} = libdevice.fast_expf(libdevice.sub_rn({held}, v{index}))")
            lines(f"{held} = v{index}")
            self.values[index] = MatrixValue(Value(f"v{index}", "float32"), taken.axes)
        elif index in self.tiling.scaled_by:
            lines(f"{held} = {held} * {self.scale(index)} + {text}")
        else:
            lines(f"{held} = {how.combine(held, text)}")

    def scale(self, index: int) -> str:
        """What the lanes of a sum are multiplied by when their maximum becomes another."""
        maximum = self.tiling.scaled_by[index]
        lies = zip(self.accumulator_axes[maximum], self.accumulator_axes[index], strict=True)
        alike = all(group in (None, other) for group, other in lies)
        return f"s{maximum}" if alike else f"tl.trans(s{maximum})"

    def _operand_value(self, operand: Operand, axes: Axes) -> MatrixValue:
        node = self.graph[operand.source]
        known = operand.source in self.outer.values or self.mapping.is_in_memory(operand)
        if (
            known
            and node.kind != "constant"
            and not has_positions(self.schedule, self.tiling.group, operand)
        ):
            return self.outer._operand_value(operand, axes)
        return super()._operand_value(operand, axes)

    def _counter(self, group: int, axis: int) -> str:
        if group != self.tiling.group:
            return self.outer._counter(group, axis)
        name = f"{'ij'[axis]}{group}"
        if (group, axis) not in self._counters:
            shape = ("[:, None]", "[None, :]")[axis]
            self.load_lines(
                f"{name} = {self.first} + tl.arange(0, {self.lane_counts[group]}){shape}"
            )
            mask = f"in_{name}" if self.position_count else None
            if mask:
                self.load_lines(f"{mask} = {name} < {self.position_count}")
            self._counters[group, axis] = mask
        return name

    def _mask(self, group: int, axis: int) -> str | None:
        if group != self.tiling.group:
            return self.outer._mask(group, axis)
        return super()._mask(group, axis)


def dot_or_reduction(node: Node) -> Reduction:
    """How a reduction is kept, or a dot: as a sum."""
    if node.kind == "dot":
        return Reduction(node, "float32", "0.0", "tl.sum({}, {}{keep})", "{} + {}")
    return make_reduction(node)


def _write_results(around: MatrixWriter, turn: _SequenceTile) -> None:
    """What all turns come to: lanes are put together, first those of maxima and their sums."""
    found, lines = turn.tiling, around.lines
    for maximum, total in found.softmax_sums.items():
        lines(f"# {around.graph.describe(maximum)}")
        _write_result(around, turn, maximum, f"a{maximum}")
        lines(f"s{maximum} = libdevice.fast_expf(libdevice.sub_rn(a{maximum}, v{maximum}))")
        lines(f"# {around.graph.describe(total)}")
        _write_result(around, turn, total, f"a{total} * {turn.scale(total)}")
        # A place above -inf adds 1 where its score is the highest, so 0 tells that there is none.
        lines(f'v{maximum} = tl.where(v{total} == 0.0, float("-inf"), v{maximum})')
        lines(f'v{total} = tl.where(v{total} == 0.0, float("nan"), v{total})')
    for index in found.accumulated:
        if index not in found.softmax_sums and index not in found.softmax_sums.values():
            lines(f"# {around.graph.describe(index)}")
            _write_result(around, turn, index, _final_accumulator(turn, index))
            if index in found.scaled_by:
                _divide(around, turn, index)
    for index in found.accumulated:
        if index in around.mapping.outputs:
            around.store(index)


def _final_accumulator(turn: _SequenceTile, index: int) -> str:
    return f"a{index} * {turn.scale(index)}" if index in turn.tiling.scaled_by else f"a{index}"


def _write_result(around: MatrixWriter, turn: _SequenceTile, index: int, text: str) -> None:
    """The value of a reduction from what the lanes hold."""
    how, left = dot_or_reduction(around.graph[index]), list(turn.accumulator_axes[index])
    removed = find_groups(around.mapping.reduced_loops[index], around.schedule.loop_groups)
    for axis, group in enumerate(turn.accumulator_axes[index]):
        if group in removed:
            text, left[axis] = how.reduce(text, axis), None
    value = how.from_partial(text)
    around.lines(f"v{index} = {value.text}")
    around.values[index] = MatrixValue(Value(f"v{index}", value.dtype), (left[0], left[1]))


def _divide(around: MatrixWriter, turn: _SequenceTile, index: int) -> None:
    """Divide by the sum of the powers what was to be divided by it; without a maximum that is a
    number there is no other sum of something times a power, either."""
    laid, total = around.values[index], turn.tiling.softmax_sums[turn.tiling.scaled_by[index]]
    divisor = around._operand_value(Operand(total), laid.axes).value.text
    if index in turn.tiling.needs_division:
        around.lines(f"v{index} = v{index} * (1.0 / {divisor})")
    else:
        around.lines(f'v{index} = tl.where({divisor} != {divisor}, float("nan"), v{index})')
