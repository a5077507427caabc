"""How Triton spreads a tile over the threads of a program.

Neighbours in memory go to one thread as far as one access of 16 bytes takes them, then to the lanes
of a warp, then to the next warp; what is left of either lies along the other axis.  So warps share
a row wherever the row is long enough for that, however many rows the tile has.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.fusion.codegen.tiling.kernel_plan import WARP

ACCESS_BYTES = 16
"""The widest access of one thread."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Elements and rows that one thread has, of them ``vector`` neighbours; ``lanes`` of a warp and
    ``warps`` share a row."""

    elements: int
    rows: int
    vector: int
    lanes: int
    warps: int


def spread(rows: int, columns: int, warps: int, widest: int, along_rows: bool = False) -> Spread:
    """A tile of rows by columns, both powers of two; ``widest``: elements that one access takes.

    ``along_rows``: neighbours in memory are those of one column.
    """
    fast, slow = (rows, columns) if along_rows else (columns, rows)
    vector = max(1, min(widest, fast, rows * columns // (WARP * warps)))
    lanes = min(WARP, max(1, fast // vector))
    beside = min(warps, max(1, fast // (vector * lanes)))
    others, below = WARP // lanes, warps // beside
    of_fast = max(vector, fast // (lanes * beside))
    of_slow = max(1, slow // (others * below))
    if along_rows:
        return Spread(of_fast * of_slow, of_fast, vector, others, min(below, -(-slow // others)))
    return Spread(of_fast * of_slow, of_slow, vector, lanes, beside)
