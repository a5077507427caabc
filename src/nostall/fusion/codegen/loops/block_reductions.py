"""Reductions over blocks of neighbouring columns, beside those over whole rows.

Block-wise quantisation behind a norm reduces a row twice: the norm removes all of its columns, and
the scales remove 128 neighbouring columns each.  If every chunk of a tile has whole blocks, the
second reduction needs nothing from outside of the chunk: it is computed like an elementwise
operator, also in a loop over the columns.  Its result has the same value in all columns of a block.

Blocks have a power of two of columns, so that chunks of a tile, which are powers of two, have a
whole number of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from nostall.fusion.codegen.loops.mapping import LoopMapping

MAX_BLOCK_COLUMNS = 1024
"""Columns of a block at most: each iteration of a loop over the columns has whole blocks."""


def block_reductions(mapping: LoopMapping, columns: Collection[int]) -> tuple[int, ...]:
    """The reductions of a mapping that remove blocks of neighbouring columns, in graph order.

    ``columns``: the loops that reductions over whole rows remove.
    """
    ordered = sorted(columns)
    if not ordered or ordered[-1] != len(mapping.loop_sizes) - 1:
        return ()  # rows are neighbours in memory, not columns
    return tuple(
        index
        for index, loops in mapping.reduced_loops.items()
        if loops
        and len(loops) < len(ordered)
        and sorted(loops) == ordered[-len(loops) :]
        and _is_block(block_columns(mapping, index))
    )


def block_columns(mapping: LoopMapping, index: int) -> int:
    """The number of columns that a block reduction reduces to one value."""
    return math.prod(mapping.loop_sizes[loop] for loop in mapping.reduced_loops[index])


def _is_block(columns: int) -> bool:
    return columns & (columns - 1) == 0 and columns <= MAX_BLOCK_COLUMNS
