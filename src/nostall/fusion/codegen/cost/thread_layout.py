"""How Triton spreads a tile over the threads of a program.

Neighbours in memory go to one thread as far as one access of 16 bytes takes them, then to the lanes
of a warp, then to the next warp; what is left of either lies along the other axis.  So warps share
a row wherever the row is long enough for that, however many rows the tile has.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.fusion.codegen.tiling.kernel_plan import WARP_SIZE

ACCESS_BYTES = 16
"""The widest access of one thread."""


@dataclass(frozen=True, slots=True)
class ThreadLayout:
    """Elements and rows that one thread has, of them ``vector`` neighbours; ``lanes_per_row`` of a warp and
    ``warps_per_row`` share a row."""

    elements_per_thread: int
    rows_per_thread: int
    vector: int
    lanes_per_row: int
    warps_per_row: int


def thread_layout(
    rows: int, columns: int, warps: int, widest: int, along_rows: bool = False
) -> ThreadLayout:
    """A tile of rows by columns, both powers of two; ``widest``: elements that one access takes.

    ``along_rows``: neighbours in memory are those of one column.
    """
    fast, slow = (rows, columns) if along_rows else (columns, rows)
    vector = max(1, min(widest, fast, rows * columns // (WARP_SIZE * warps)))
    lanes = min(WARP_SIZE, max(1, fast // vector))
    beside = min(warps, max(1, fast // (vector * lanes)))
    others, below = WARP_SIZE // lanes, warps // beside
    of_fast = max(vector, fast // (lanes * beside))
    of_slow = max(1, slow // (others * below))
    if along_rows:
        return ThreadLayout(
            of_fast * of_slow, of_fast, vector, others, min(below, -(-slow // others))
        )
    return ThreadLayout(of_fast * of_slow, of_slow, vector, lanes, beside)
