"""Lanes of the tensors of small dots: powers of two along every axis."""

from __future__ import annotations

import math

from nostall.fusion.codegen.loops.dot_axes import groups_of, sides
from nostall.fusion.codegen.loops.mapping import used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.sequence_tiles import touching

LEAST_DOT = 16
"""Lanes along every axis of a ``tl.dot``."""


def power_above(count: int) -> int:
    """The smallest power of two that is at least ``count``."""
    return 1 << max(0, count - 1).bit_length()


def matrix_widths(of: Schedule) -> tuple[int, ...]:
    """Lanes of an axis that counts through each group, at least as many as ``tl.dot`` takes where
    the group has a part in one."""
    mapping = of.mapping
    least = [1] * len(of.groups)
    for index in mapping.operators:
        if mapping.graph[index].kind == "dot":
            found = [groups_of(side, of.groups) for side in sides(mapping, index)]
            if all(found):
                for (at,) in found:
                    least[at] = LEAST_DOT
    return tuple(
        max(lanes, power_above(of.count(group)))
        for lanes, group in zip(least, of.groups, strict=True)
    )


def largest_matrix(of: Schedule, beside: int | None = None) -> int:
    """Lanes of the largest tensor, of those without the group ``beside`` where one is given."""
    widths, mapping = matrix_widths(of), of.mapping
    found = [1]
    for index in mapping.operators:
        touched = [mapping.loops[index], *(used(o.places) for o in mapping.operands[index])]
        groups = (groups_of(loops, of.groups) for loops in touched)
        found += [math.prod(widths[at] for at in some) for some in groups if beside not in some]
    return max(found)


def lanes_beside(of: Schedule, group: int) -> int:
    """The most lanes of a tensor for each place of a group."""
    widths = matrix_widths(of)
    found = (
        math.prod(widths[at] for at in groups_of(loops, of.groups) if at != group)
        for loops in touching(of, group)
    )
    return max(found, default=1)
