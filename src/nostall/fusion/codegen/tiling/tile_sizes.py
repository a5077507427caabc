"""Lanes of the tensors of small dots: powers of two along every axis."""

from __future__ import annotations

import math

from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.sequence_tiles import tensor_loops_along

MIN_DOT_LANES = 16
"""Lanes along every axis of a ``tl.dot``."""


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


def group_lanes(schedule: Schedule) -> tuple[int, ...]:
    """Lanes of an axis that counts through each group, at least as many as ``tl.dot`` takes where
    the group has a part in one."""
    mapping = schedule.mapping
    least = [1] * len(schedule.loop_groups)
    for index in mapping.operators:
        if mapping.graph[index].kind == "dot":
            found = [find_groups(side, schedule.loop_groups) for side in dot_loops(mapping, index)]
            if all(found):
                for (at,) in found:
                    least[at] = MIN_DOT_LANES
    return tuple(
        max(lanes, next_power_of_two(schedule.count(group)))
        for lanes, group in zip(least, schedule.loop_groups, strict=True)
    )


def max_matrix_lanes(schedule: Schedule, beside: int | None = None) -> int:
    """Lanes of the largest tensor, of those without the group ``beside`` where one is given."""
    widths, mapping = group_lanes(schedule), schedule.mapping
    found = [1]
    for index in mapping.operators:
        touched = [mapping.loops[index], *(loops_used(o.accesses) for o in mapping.operands[index])]
        groups = (find_groups(loops, schedule.loop_groups) for loops in touched)
        found += [math.prod(widths[at] for at in some) for some in groups if beside not in some]
    return max(found)


def max_lanes_per_position(schedule: Schedule, group: int) -> int:
    """The most lanes of a tensor for each place of a group."""
    widths = group_lanes(schedule)
    found = (
        math.prod(widths[at] for at in find_groups(loops, schedule.loop_groups) if at != group)
        for loops in tensor_loops_along(schedule, group)
    )
    return max(found, default=1)
