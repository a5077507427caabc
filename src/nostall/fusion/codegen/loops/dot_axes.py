"""Small batched dots: which loops are rows, and which count through an axis of a matrix.

A program has one element of the batch: those loops are its *rows*.  All others are in *groups*,
loops that always go together; every value has at most two of them, one for each axis of its tensor.
A dot of (m, k) and (k, n) has three, so a group may lie along either axis, from value to value.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.loops.mapping import LoopMapping, Loops
from nostall.fusion.errors import BadFusion

MAX_MATRIX_AXIS = 128
"""Elements along an axis of a matrix: three of 128 x 128 in fp32 are what shared memory holds."""


def has_dots(mapping: LoopMapping) -> bool:
    return any(mapping.graph[i].kind == "dot" for i in mapping.operators)


def group_loops(mapping: LoopMapping) -> tuple[Loops, tuple[Loops, ...]]:
    """The rows and the groups of a pattern with dots.  Raises :class:`BadFusion`."""
    dots = [i for i in mapping.operators if mapping.graph[i].kind == "dot"]
    batches = {i: _batch_loops(mapping, i) for i in dots}
    rows = batches[dots[0]]
    removed = [gone for gone in mapping.reduced_loops.values() if gone]
    matrix = frozenset(range(len(mapping.loop_sizes))) - rows
    if not rows or not matrix:
        what = "no batch" if not rows else "matrices of single numbers"
        raise BadFusion(f"{mapping.graph[dots[0]]} has {what}; leave it to the library")
    if any(batch != rows for batch in batches.values()) or any(gone & rows for gone in removed):
        raise BadFusion(
            f"operators {mapping.operators} do not all stay within one element of the batch of "
            f"{mapping.graph[dots[0]]}; put those that reach over it into another kernel"
        )
    seen = [*removed, *(mapping.loops[i] for i in mapping.operators)]
    seen += [side for i in dots for side in dot_loops(mapping, i)]
    together: dict[tuple[bool, ...], list[int]] = {}
    for loop in sorted(matrix):
        together.setdefault(tuple(loop in some for some in seen), []).append(loop)
    groups = tuple(tuple(loops) for loops in together.values())
    for index in mapping.operators:
        _check_operator(mapping, index, rows, groups)
    return tuple(sorted(rows)), groups


def dot_loops(
    mapping: LoopMapping, index: int
) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """The loops of a dot's m, n and k."""
    *_, m, n = mapping.accesses[index]
    return frozenset(m.loops), frozenset(n.loops), mapping.reduced_loops[index]


def find_groups(loops: frozenset[int], groups: tuple[Loops, ...]) -> tuple[int, ...]:
    """The groups that have some of these loops."""
    return tuple(at for at, group in enumerate(groups) if loops & set(group))


def _batch_loops(mapping: LoopMapping, index: int) -> frozenset[int]:
    *batch, _, _ = mapping.accesses[index]
    return frozenset(loop for place in batch for loop in place.loops)


def _check_operator(
    mapping: LoopMapping, index: int, rows: frozenset[int], groups: tuple[Loops, ...]
) -> None:
    node = mapping.graph[index]
    touched = [mapping.loops[index] | mapping.reduced_loops.get(index, frozenset())]
    if node.kind == "dot":
        touched = list(dot_loops(mapping, index))
        if any(len(find_groups(side, groups)) > 1 for side in touched):
            raise BadFusion(f"{node} has an axis of which others see parts; give it its own kernel")
        touched = [touched[0] | touched[2], touched[2] | touched[1], touched[0] | touched[1]]
    for loops in touched:
        found = find_groups(loops - rows, groups)
        if len(found) > 2:
            raise BadFusion(f"{node} is no matrix for each element of the batch")
        for at in found:
            size = math.prod(mapping.loop_sizes[loop] for loop in groups[at])
            if size > MAX_MATRIX_AXIS:
                raise BadFusion(
                    f"{node} has matrices with {size} along an axis; beside small dots it is at "
                    f"most {MAX_MATRIX_AXIS}; leave it to the library"
                )
