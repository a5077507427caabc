"""Triton's blocked layout: how the elements of a tile are spread over the threads of a program.

Contiguous elements go to one thread up to one access of 16 bytes, then to the lanes of a warp, then
to the next warp. Lanes and warps that are left are spread along the other axis. So several warps
share a row if the row is long enough, however many rows the tile has.
"""

from __future__ import annotations

from dataclasses import dataclass

from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE

ACCESS_BYTES = 16
"""The widest access of one thread."""


@dataclass(frozen=True, slots=True)
class ThreadLayout:
    """The share of one thread in a tile."""

    elements_per_thread: int
    rows_per_thread: int
    vector: int  # contiguous elements of a thread
    lanes_per_row: int  # lanes of a warp that share a row
    warps_per_row: int


def thread_layout(
    rows: int, columns: int, warps: int, max_vector: int, along_rows: bool = False
) -> ThreadLayout:
    """The layout of a tile of ``rows`` by ``columns``, both powers of two.

    ``max_vector``: elements of one access. ``along_rows``: contiguous elements are those of one
    column.
    """
    fast, slow = (rows, columns) if along_rows else (columns, rows)
    vector = max(1, min(max_vector, fast, rows * columns // (WARP_SIZE * warps)))
    fast_lanes = min(WARP_SIZE, max(1, fast // vector))
    fast_warps = min(warps, max(1, fast // (vector * fast_lanes)))
    slow_lanes, slow_warps = WARP_SIZE // fast_lanes, warps // fast_warps
    fast_elements = max(vector, fast // (fast_lanes * fast_warps))
    slow_elements = max(1, slow // (slow_lanes * slow_warps))
    elements = fast_elements * slow_elements
    if along_rows:
        warps_per_row = min(slow_warps, -(-slow // slow_lanes))
        return ThreadLayout(elements, fast_elements, vector, slow_lanes, warps_per_row)
    return ThreadLayout(elements, slow_elements, vector, fast_lanes, fast_warps)
