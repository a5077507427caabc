"""Reductions behind products: over the columns of each row, or over the rows of each column.

No program has a whole row or column, so each stores one partial result for its part of it.  A
second kernel combines these in a fixed order, so results are deterministic.  Examples: the gradient
of a bias behind the derivative of an activation, the sum of squares of a norm, a row's maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nostall.fusion.codegen.emit.program import Launch, Workspace
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.emit.tile_parts import Chunk, Rows, TileValue, zero_condition
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES, Value
from nostall.fusion.codegen.loops.mapping import LoopMapping, Loops
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.planned_kernel import KernelFacts
from nostall.fusion.codegen.tiling.product_config import ProductConfig, ProductShape
from nostall.fusion.codegen.tiling.tile_sizes import finish_tile, next_power_of_two
from nostall.fusion.errors import BadFusion
from nostall.fusion.products.product_graph import ProductGraph

MAX_GROUPS = 64
"""Partial results of one element that the second kernel reads at once."""


@dataclass(frozen=True)
class Reduced:
    """The reductions that leave one axis of the products, and the operators behind them."""

    loops: Loops
    """The loops of the axis that stays."""
    of_rows: bool
    """Whether each row has a result; else each column has one."""
    reductions: tuple[int, ...]
    finishing: tuple[int, ...]


def reduced_axes(
    kernel: ProductGraph, mapping: LoopMapping, rows: Loops, columns: Loops
) -> tuple[Reduced, ...]:
    """The reductions of a kernel by the axis that stays.

    Raises :class:`BadFusion` if one removes a part of an axis, or if an operator behind it has
    other elements than its result.
    """
    found = []
    left = {*kernel.reductions, *kernel.finishing}
    for kept, removed, of_rows in ((rows, columns, True), (columns, rows, False)):
        mine = [i for i in kernel.reductions if mapping.reduced_loops[i] == set(removed)]
        behind = [i for i in kernel.finishing if mapping.loops[i] == set(kept)]
        left -= {*mine, *behind}
        if mine:
            found.append(Reduced(kept, of_rows, tuple(mine), tuple(behind)))
    if left:
        raise BadFusion("a reduction of a product removes something else than its rows or columns")
    return tuple(found)


class Partials:
    """Writes partial results in the kernel of the products, and the kernels that combine them."""

    def __init__(
        self,
        axes: tuple[Reduced, ...],
        schedule: Schedule,
        shape: ProductShape,
        config: ProductConfig,
    ) -> None:
        self._axes, self._facts = axes, KernelFacts(schedule)
        self._shape, self._config = shape, config

    @property
    def workspaces(self) -> tuple[Workspace, ...]:
        """Partial results of all programs, by the number of the group and the element."""
        return tuple(
            Workspace(
                f"w{index}",
                self._facts.reductions[index].dtype,
                self._groups(axis) * self._size(axis),
            )
            for axis in self._axes
            for index in axis.reductions
        )

    def _groups(self, axis: Reduced) -> int:
        rows, columns = self._config.tiles(self._shape)
        return columns * self._config.parts if axis.of_rows else rows

    def _size(self, axis: Reduced) -> int:
        return self._shape.rows if axis.of_rows else self._shape.columns

    def store(self, tile: Tile, chunk: Chunk, part: int) -> None:
        """Store what one part of the columns of a tile adds to each reduction."""
        for axis in self._axes:
            group = f"(column * {self._config.parts} + {part})" if axis.of_rows else "row"
            counter, mask = ("r", tile.rows.mask) if axis.of_rows else (chunk.counter, chunk.mask)
            for index in axis.reductions:
                reduction = self._facts.reductions[index]
                tile.lines(f"# {tile.graph.describe(index)}")
                text, _ = tile.partial_result(index, reduction, chunk)
                if tile.rows.mask and not axis.of_rows:
                    text = f"tl.where({tile.rows.mask}, {text}, {reduction.neutral})"
                text = reduction.reduce(text, 1 if axis.of_rows else 0)
                masked = f", mask={mask}" if mask else ""
                place = f"w{index} + {group} * {self._size(axis)} + {counter}"
                tile.lines(f"tl.store({place}, {text}{masked})")

    def launches(self, name: str) -> Iterator[tuple[Lines, Launch]]:
        """The kernels that combine the partial results, one for each axis that stays."""
        mapping = self._facts.schedule.mapping
        for number, axis in enumerate(self._axes):
            groups = min(MAX_GROUPS, next_power_of_two(self._groups(axis)))
            width, warps = finish_tile(groups, self._size(axis))
            lines = Lines()
            with lines.block():
                self._write_combination(axis, groups, width, lines)
            outputs = [i for i in (*axis.reductions, *axis.finishing) if i in mapping.outputs]
            tensors = [f"p{index}" for index in (*mapping.inputs_of(axis.finishing), *outputs)]
            arguments = (*tensors, *(f"w{index}" for index in axis.reductions))
            grid = (-(-self._size(axis) // width), 1)
            yield lines, Launch(f"{name}_{number + 1}", arguments, (), grid, warps)

    def _write_combination(self, axis: Reduced, groups: int, width: int, lines: Lines) -> None:
        size, count = self._size(axis), self._groups(axis)
        lines("pid = tl.program_id(0)")
        lines(f"c = pid * {width} + tl.arange(0, {width})[None, :]")
        lines(f"inside = c < {size}")
        chunk = Chunk(width, "c", "inside", "")
        rows = Rows((), 1, "0", None, zero_condition("pid"))
        tile = Tile(self._facts, axis.loops, rows, (chunk,), lines)
        for index in axis.reductions:
            reduction = self._facts.reductions[index]
            dtype = TRITON_DTYPES[reduction.dtype]
            lines(f"# {tile.graph.describe(index)}")
            lines(f"a{index} = tl.full(({groups}, {width}), {reduction.neutral}, {dtype})")
            with lines.block(f"for first in range(0, {count}, {groups}):"):
                lines(f"group = first + tl.arange(0, {groups})[:, None]")
                place = f"w{index} + group * {size} + c"
                mask = f"(group < {count}) & inside"
                load = f"tl.load({place}, mask={mask}, other={reduction.neutral})"
                lines(f"a{index} = {reduction.combine(f'a{index}', load)}")
            result = reduction.from_partial(reduction.reduce(f"a{index}", 0))
            lines(f"v{index} = {result.text}")
            value = Value(f"v{index}", result.dtype)
            tile.values[index, ""] = TileValue(value, has_rows=False, has_columns=True)
            if index in tile.mapping.outputs:
                tile.store(index)
        tile.write(axis.finishing)
