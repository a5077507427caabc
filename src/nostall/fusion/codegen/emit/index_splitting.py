"""Index-set splitting for one-hot conditions in loops over columns.

A condition ``column == label`` is true in at most one iteration of a loop over the columns of a
row. All other iterations run a copy of the body in which the condition is the constant false, so
the compiler removes the operators that depend on it (the one-hot vector in the gradient of
cross-entropy, for example). All threads of a program must take the same branch, so this applies to
programs of one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nostall.fusion.codegen.emit.one_hot import is_one_hot
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.expressions.index_width import narrow_to_int32


def one_hot_columns(tile: Tile, indices: Iterable[int]) -> dict[int, str]:
    """The one-hot conditions among operators, each with the int32 text of its column number.

    Conditions that another loop or kernel reads are left out.
    """
    numbers = {
        index: _column_number(tile, index)
        for index in indices
        if index not in tile.materialized and is_one_hot(tile.schedule, index)
    }
    return {index: number for index, number in numbers.items() if number}


def _column_number(tile: Tile, index: int) -> str:
    """The column number that a one-hot condition compares with, as int32.

    Empty if the counter is not the column number, if the number does not fit into int32, or if all
    rows have the same number.
    """
    graph, operands = tile.graph, tile.mapping.operands[index]
    (counter,) = [o for o in operands if graph[o.source].op == "iota"]
    (other,) = [o for o in operands if o is not counter]
    (chunk,) = tile.chunks
    if tile.operand_value(counter, chunk).int32_text != f"({chunk.counter})":
        return ""
    value = tile.operand_value(other, None).value
    return narrow_to_int32(value, is_row_value=True) if value.number is None else ""


def write_column_scalars(tile: Tile, numbers: dict[int, str]) -> None:
    """Write the column numbers of a row as scalars ``s{index}``, on which threads can branch."""
    for index, number in numbers.items():
        tile.lines(f"s{index} = tl.sum(tl.sum({number}, 1), 0)")


def chunk_condition(conditions: Sequence[int], start: str, width: int) -> str:
    """A condition that is true if a chunk from column ``start`` has one of the columns."""
    ranges = (f"(s{index} >= {start}) & (s{index} < {start} + {width})" for index in conditions)
    return " or ".join(ranges)
