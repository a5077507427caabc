"""Turns of a walk that do not have the column whose number the row knows.

A label's column is in one turn at most.  In all others its condition (``column == number``) is
false, and compilers leave out what follows from it: the one-hot vector in the gradient of
cross-entropy costs nothing there.  The threads of a program have to agree which kind a turn is, so
this is for programs of one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nostall.fusion.codegen.emit.one_hot import is_one_hot
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.expressions.index_width import narrow_to_int32


def one_hot_columns(tile: Tile, indices: Iterable[int]) -> dict[int, str]:
    """Of some operators those that are true at one column at most, and that column's number: an
    int32 of the row, in the kernel.  What is ``kept`` has to be made as it is."""
    found = {
        index: _column_number(tile, index)
        for index in indices
        if index not in tile.materialized and is_one_hot(tile.schedule, index)
    }
    return {index: number for index, number in found.items() if number}


def _column_number(tile: Tile, index: int) -> str:
    """Empty where numbers are not those of columns, are wide, or the same in all rows."""
    graph, operands = tile.graph, tile.mapping.operands[index]
    (counter,) = [o for o in operands if graph[o.source].op == "iota"]
    (other,) = [o for o in operands if o is not counter]
    (chunk,) = tile.chunks
    if tile.operand_value(counter, chunk).int32_text != f"({chunk.counter})":
        return ""
    value = tile.operand_value(other, None).value
    return narrow_to_int32(value, is_row_value=True) if value.number is None else ""


def write_column_scalars(tile: Tile, numbers: dict[int, str]) -> None:
    """Name the columns once for a row, as scalars: threads agree on those."""
    for index, number in numbers.items():
        tile.lines(f"s{index} = tl.sum(tl.sum({number}, 1), 0)")


def chunk_condition(conditions: Sequence[int], first: str, width: int) -> str:
    """Whether one of the columns may be in the turn that begins with column ``first``."""
    within = (f"(s{index} >= {first}) & (s{index} < {first} + {width})" for index in conditions)
    return " or ".join(within)
