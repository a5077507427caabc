"""Sizes of tiles: powers of two for rows, columns, loop groups of dots, and the second stage.

A *lane* is one element of a tensor in a kernel. Tensors have a power of two of lanes along every
axis, so some lanes may have no element: they are masked.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.sequence_tiles import tensor_loops_along

WARP_SIZE = 32
"""Threads of a warp."""

# Columns of a row
MAX_IDLE_SHARE = 1 / 16
"""Share of masked lanes above which a row is cut into several powers of two."""
MIN_CHUNK = 128
"""Columns of an equal chunk. Smaller chunks would give each thread many chunks of few elements."""

# Small dots
MIN_DOT_LANES = 16
"""Lanes along every axis of a ``tl.dot``."""

# The second kernel of the scheme ``column``
FINISH_TILE = 4096
"""Partial results that one program loads at once."""
MIN_FINISH_WIDTH = 8
"""Columns of a program. Fewer would not fill a 32-byte sector of L2."""
MIN_FINISH_WARPS = 4
MAX_FINISH_ELEMENTS = 64
"""Elements of the tile for each thread."""


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


# -- columns of a row ------------------------------------------------------------------------------


def idle_share(count: int, chunks: tuple[int, ...]) -> float:
    """Share of the lanes of ``chunks`` that are masked if there are ``count`` columns."""
    return 1 - count / sum(chunks)


def mixed_chunks(count: int) -> tuple[int, ...]:
    """The fewest powers of two that hold ``count`` columns, :data:`MAX_IDLE_SHARE` of lanes masked.

    Largest first. Of equally few chunks, those with the fewest masked lanes. Every column is in
    exactly one chunk, so only the last chunk can have masked lanes.
    """
    for chunks in range(1, count.bit_length() + 1):
        # Rounding up at the highest bits leaves at most that many bits set.
        total = count
        while total.bit_count() > chunks:
            total += total & -total
        if 1 - count / total <= MAX_IDLE_SHARE:
            break
    return tuple(1 << bit for bit in reversed(range(total.bit_length())) if total >> bit & 1)


def equal_chunks(count: int) -> tuple[int, ...]:
    """The fewest equal powers of two that hold ``count`` columns, as :func:`mixed_chunks`.

    Chunks do not get smaller than :data:`MIN_CHUNK`, even if more lanes are masked then. Equal
    chunks have the same thread layout: they are added up element by element before the reduction,
    and no layout conversion through shared memory is needed.
    """
    width = next_power_of_two(count)
    while -(-count // width) * width * (1 - MAX_IDLE_SHARE) > count and width > MIN_CHUNK:
        width //= 2
    return (width,) * -(-count // width)


# -- the second stage of a two-stage reduction -----------------------------------------------------


def finish_tile(splits: int, results: int) -> tuple[int, int]:
    """Columns and warps of a program that reduces ``splits`` partial results for each result."""
    width = min(next_power_of_two(results), max(MIN_FINISH_WIDTH, FINISH_TILE // splits))
    return width, max(MIN_FINISH_WARPS, width * splits // (WARP_SIZE * MAX_FINISH_ELEMENTS))


# -- small dots ------------------------------------------------------------------------------------


def group_lanes(schedule: Schedule) -> tuple[int, ...]:
    """Lanes of each loop group; at least :data:`MIN_DOT_LANES` for the axes of a ``tl.dot``."""
    mapping = schedule.mapping
    min_lanes = [1] * len(schedule.loop_groups)
    for index in mapping.operators:
        if mapping.graph[index].kind == "dot":
            axes = [find_groups(loops, schedule.loop_groups) for loops in dot_loops(mapping, index)]
            if all(axes):
                for (group,) in axes:
                    min_lanes[group] = MIN_DOT_LANES
    return tuple(
        max(lanes, next_power_of_two(schedule.count(loops)))
        for lanes, loops in zip(min_lanes, schedule.loop_groups, strict=True)
    )


def max_matrix_lanes(schedule: Schedule, without: int | None = None) -> int:
    """Lanes of the largest tensor; only tensors that do not vary along the group ``without``."""
    lanes, mapping = group_lanes(schedule), schedule.mapping
    sizes = [1]
    for index in mapping.operators:
        operands = mapping.operands[index]
        tensors = [mapping.loops[index], *(loops_used(o.accesses) for o in operands)]
        axes = (find_groups(loops, schedule.loop_groups) for loops in tensors)
        sizes += [math.prod(lanes[at] for at in groups) for groups in axes if without not in groups]
    return max(sizes)


def max_lanes_per_position(schedule: Schedule, group: int) -> int:
    """Lanes of the largest tensor along ``group``, for each position of that group."""
    lanes = group_lanes(schedule)
    sizes = (
        math.prod(lanes[at] for at in find_groups(loops, schedule.loop_groups) if at != group)
        for loops in tensor_loops_along(schedule, group)
    )
    return max(sizes, default=1)


def positions_per_tile(schedule: Schedule, group: int, lanes: int) -> int:
    """Positions of ``group`` in a tile whose largest tensor has ``lanes`` lanes."""
    return lanes // max_lanes_per_position(schedule, group)
