"""The left operand of products, computed by elementwise operators where a tile of it is needed.

Operators of which values have no depth (the scale of a row) are computed before the loop over the
depth, all others in each iteration.  Every tile of columns computes the operand again, so this
gains only where it costs less than to write and read the operand: a measurement decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.emit.tile_parts import Chunk, Rows
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import to_storage
from nostall.fusion.codegen.loops.mapping import LoopMapping, Loops, loops_used, map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_facts import KernelFacts
from nostall.fusion.codegen.tiling.product_config import ProductConfig
from nostall.fusion.errors import BadFusion
from nostall.fusion.products.product_graph import ProductGraph


@dataclass(frozen=True)
class OperandAxes:
    """The loops of the operators in front of a product along the rows and the depth."""

    mapping: LoopMapping
    rows: Loops
    depth: Loops


def operand_axes(kernel: ProductGraph) -> OperandAxes | None:
    """The loops of the operators that compute the left operand; None if it is read.

    Raises :class:`BadFusion` if they have no common loops, or more than the operand.
    """
    if not kernel.prologue:
        return None
    if not kernel.shape.prologue_bytes:
        raise BadFusion("no tensor has all elements of the left operand")
    mapping = map_pattern(kernel.graph, kernel.prologue)
    rows, depth = (access.loops for access in mapping.accesses[kernel.left.index])
    if {*rows, *depth} != set(range(len(mapping.loop_sizes))):
        raise BadFusion("an operator in front of a product has more elements than the operand")
    return OperandAxes(mapping, rows, depth)


class LeftOperand:
    """Writes the lines that compute tiles of the left operand."""

    def __init__(
        self, kernel: ProductGraph, axes: OperandAxes, config: ProductConfig, lines: Lines
    ) -> None:
        self._node, self._mapping, self._lines = kernel.left, axes.mapping, lines
        self._config, self._depth = config, kernel.shape.depth
        self._schedule = Schedule(axes.mapping, axes.rows, axes.depth)

    def write_rows(self, mask: str | None) -> Tile:
        """Write what is the same for the whole depth of a tile of rows ``r``.

        ``mask``: which of the rows exist; None if all do.
        """
        rows = Rows(self._schedule.rows, self._config.rows, "r", mask, "tile == 0")
        tile = Tile(KernelFacts(self._schedule), self._schedule.columns, rows, (), self._lines)
        for index in self._mapping.operators:
            if not tile.has_columns(index):
                tile.compute(index)
        depth = set(self._schedule.columns)
        for index in self._mapping.operators:
            for operand in self._mapping.operands[index]:
                is_row_value = not loops_used(operand.accesses) & depth
                if self._mapping.is_in_memory(operand) and is_row_value:
                    tile.operand_value(operand, None)
        return tile

    def write_operand(self, before: Tile) -> str:
        """Write the operand's tile at depth ``k``, with 0 behind the end; returns its text.

        ``before``: the tile of :meth:`write_rows`.
        """
        lines, width = self._lines, self._config.depth
        mask = "deep" if self._depth % width else None
        lines("e = k + d[None, :]")
        if mask:
            lines(f"{mask} = e < {self._depth}")
        tile = before.with_chunk(Chunk(width, "e", mask, ""))
        for index in self._mapping.operators:
            if tile.has_columns(index):
                tile.compute(index)
        value = tile.values[self._node.index, ""].value
        text = f"tl.broadcast_to({value.text}, ({self._config.rows}, {width}))"
        if mask:
            text = f"tl.where({mask}, {text}, 0.0)"
        lines(f"computed = {text}")
        return to_storage("computed", self._node.dtype)
