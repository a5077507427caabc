"""The body of a kernel that takes small dots with vectors by turns of a few places (``turns``).

Whole turns are a loop without masks, what is left is one more turn behind it.  What removes places
is kept for each lane and put together once, at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from nostall.fusion.codegen.emit.dots import Axes, Laid, Matrices
from nostall.fusion.codegen.emit.prologue import row_block
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import (
    LARGEST_FLOAT,
    TRITON_DTYPES,
    Reduction,
    Value,
    reduction,
)
from nostall.fusion.codegen.loops.dot_axes import groups_of
from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, turn_of, turn_places
from nostall.fusion.codegen.tiling.sequence_tiles import Walk, has_places
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.graph import Node


def write_turned(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """The body for the element number ``pid`` of the batch; returns how many there are."""
    found = turn_of(of)
    places, count = turn_places(of, plan), of.count(of.groups[found.group])
    row_block(of, plan, lines, "pid")
    reading, before, after = Lines(), Lines(), Lines()
    around = Matrices(of, reading, before)
    _compute(around, found.before)
    whole = count // places * places
    turns = [_Turn(around, found, places, "first")]
    if whole < count:
        turns.append(_Turn(around, found, places, str(whole), count))
    for turn in turns:
        _compute(turn, found.during, ends_later=found.results)
    around.lines = after
    _results(around, turns[0])
    _compute(around, found.after)
    lines.add(reading)
    lines.add(before)
    turns[0].write_begin(lines)
    with lines.block(f"for first in range(0, {whole}, {places}):"):
        turns[0].write(lines)
    for turn in turns[1:]:
        turn.write(lines)
    lines.add(after)
    return Extent(of.row_count)


def _compute(
    matrices: Matrices, operators: Iterable[int], ends_later: Collection[int] = ()
) -> None:
    for index in operators:
        matrices.lines(f"# {matrices.graph.describe(index)}")
        matrices.compute(index)
        if index in matrices.mapping.outputs and index not in ends_later:
            matrices.store(index)


class _Turn(Matrices):
    """Writes one turn, from the place ``first`` on; ``count``: where some of its lanes have no
    place, how many places there are.  What has no places is ``around``.

    A maximum that powers run along with is in a turn the running one of each lane, so what is
    computed from it is in units of that.
    """

    def __init__(
        self, around: Matrices, found: Walk, places: int, first: str, count: int | None = None
    ) -> None:
        super().__init__(around.of, Lines(), Lines())
        self.around, self.walk, self.first, self.count = around, found, first, count
        # What is read with places and without has two names.
        self._names = around._names
        widths = enumerate(around.widths)
        self.widths = tuple(places if at == found.group else lanes for at, lanes in widths)
        self.made = dict(around.made)
        self.held: dict[int, Axes] = {}

    def write(self, lines: Lines) -> None:
        lines.add(self.reading)
        lines.add(self.lines)

    def write_begin(self, lines: Lines) -> None:
        """What the lanes hold before the first turn."""
        for index, axes in self.held.items():
            how = kept(self.graph[index])
            # The difference of -inf with itself would be NaN.
            begin = repr(-LARGEST_FLOAT) if index in self.walk.totals else how.neutral
            shape = ", ".join("1" if at is None else str(self.widths[at]) for at in axes)
            lines(f"a{index} = tl.full(({shape}), {begin}, {TRITON_DTYPES[how.dtype]})")

    def compute(self, index: int) -> None:
        if index in self.walk.results:
            self._accumulate(index)
        elif index in self.walk.bare:
            self.made[index] = self.made[self.mapping.operands[index][0].source]
        else:
            super().compute(index)

    def _accumulate(self, index: int) -> None:
        """Take a turn into what each lane holds of a reduction."""
        how, lines, held = kept(self.graph[index]), self.lines, f"a{index}"
        if self.graph[index].kind == "dot":
            taken = self._products(index, self.walk.group)
        else:
            taken = self._taken(index)
        text, self.held[index] = taken.value.text, taken.axes
        if index in self.walk.totals:
            lines(f"v{index} = {how.both(held, text)}")
            lines(f"s{index} = libdevice.fast_expf(libdevice.sub_rn({held}, v{index}))")
            lines(f"{held} = v{index}")
            self.made[index] = Laid(Value(f"v{index}", "float32"), taken.axes)
        elif index in self.walk.scaled:
            lines(f"{held} = {held} * {self.scale(index)} + {text}")
        else:
            lines(f"{held} = {how.both(held, text)}")

    def scale(self, index: int) -> str:
        """What the lanes of a sum are multiplied by when their maximum becomes another."""
        maximum = self.walk.scaled[index]
        lies = zip(self.held[maximum], self.held[index], strict=True)
        alike = all(group in (None, other) for group, other in lies)
        return f"s{maximum}" if alike else f"tl.trans(s{maximum})"

    def _operand(self, operand: Operand, axes: Axes) -> Laid:
        node = self.graph[operand.source]
        known = operand.source in self.around.made or self.mapping.is_outside(operand)
        if known and node.kind != "constant" and not has_places(self.of, self.walk.group, operand):
            return self.around._operand(operand, axes)
        return super()._operand(operand, axes)

    def _counter(self, group: int, axis: int) -> str:
        if group != self.walk.group:
            return self.around._counter(group, axis)
        name = f"{'ij'[axis]}{group}"
        if (group, axis) not in self._counters:
            shape = ("[:, None]", "[None, :]")[axis]
            self.reading(f"{name} = {self.first} + tl.arange(0, {self.widths[group]}){shape}")
            mask = f"in_{name}" if self.count else None
            if mask:
                self.reading(f"{mask} = {name} < {self.count}")
            self._counters[group, axis] = mask
        return name

    def _mask(self, group: int, axis: int) -> str | None:
        if group != self.walk.group:
            return self.around._mask(group, axis)
        return super()._mask(group, axis)


def kept(node: Node) -> Reduction:
    """How a reduction is kept, or a dot: as a sum."""
    if node.kind == "dot":
        return Reduction(node, "float32", "0.0", "tl.sum({}, {}{keep})", "{} + {}")
    return reduction(node)


def _results(around: Matrices, turn: _Turn) -> None:
    """What all turns come to: lanes are put together, first those of maxima and their sums."""
    found, lines = turn.walk, around.lines
    for maximum, total in found.totals.items():
        lines(f"# {around.graph.describe(maximum)}")
        _result(around, turn, maximum, f"a{maximum}")
        lines(f"s{maximum} = libdevice.fast_expf(libdevice.sub_rn(a{maximum}, v{maximum}))")
        lines(f"# {around.graph.describe(total)}")
        _result(around, turn, total, f"a{total} * {turn.scale(total)}")
        # A place above -inf adds 1 where its score is the highest, so 0 tells that there is none.
        lines(f'v{maximum} = tl.where(v{total} == 0.0, float("-inf"), v{maximum})')
        lines(f'v{total} = tl.where(v{total} == 0.0, float("nan"), v{total})')
    for index in found.results:
        if index not in found.totals and index not in found.totals.values():
            lines(f"# {around.graph.describe(index)}")
            _result(around, turn, index, _last(turn, index))
            if index in found.scaled:
                _finish(around, turn, index)
    for index in found.results:
        if index in around.mapping.outputs:
            around.store(index)


def _last(turn: _Turn, index: int) -> str:
    return f"a{index} * {turn.scale(index)}" if index in turn.walk.scaled else f"a{index}"


def _result(around: Matrices, turn: _Turn, index: int, text: str) -> None:
    """The value of a reduction from what the lanes hold."""
    how, left = kept(around.graph[index]), list(turn.held[index])
    removed = groups_of(around.mapping.reduced[index], around.of.groups)
    for axis, group in enumerate(turn.held[index]):
        if group in removed:
            text, left[axis] = how.along(text, axis), None
    value = how.result(text)
    around.lines(f"v{index} = {value.text}")
    around.made[index] = Laid(Value(f"v{index}", value.dtype), (left[0], left[1]))


def _finish(around: Matrices, turn: _Turn, index: int) -> None:
    """Divide by the sum of the powers what was to be divided by it; without a maximum that is a
    number there is no other sum of something times a power, either."""
    laid, total = around.made[index], turn.walk.totals[turn.walk.scaled[index]]
    divisor = around._operand(Operand(total), laid.axes).value.text
    if index in turn.walk.shared:
        around.lines(f"v{index} = v{index} * (1.0 / {divisor})")
    else:
        around.lines(f'v{index} = tl.where({divisor} != {divisor}, float("nan"), v{index})')
