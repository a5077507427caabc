"""Loops of small batched dots: which ones are the batch, and which index an axis of a matrix.

A program computes one element of the batch: the batch loops are its *rows*.  All other loops are
partitioned into *groups*, loops that occur together in every tensor.  A value has at most two
groups, one for each axis of its 2D tensor.  A dot of (m, k) and (k, n) has three groups, so the
same group can be the first axis of one value and the second axis of another.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.loops.mapping import LoopMapping, Loops
from nostall.fusion.errors import BadFusion

MAX_MATRIX_AXIS = 128
"""Maximum elements along a matrix axis: shared memory holds three fp32 matrices of 128 x 128."""


def has_dots(mapping: LoopMapping) -> bool:
    return any(mapping.graph[i].kind == "dot" for i in mapping.operators)


def group_loops(mapping: LoopMapping) -> tuple[Loops, tuple[Loops, ...]]:
    """The batch loops and the loop groups of a pattern with dots.

    Raises :class:`BadFusion` if the pattern is not a computation on small matrices for each
    element of one batch.
    """
    dots = [i for i in mapping.operators if mapping.graph[i].kind == "dot"]
    batches = {i: _batch_loops(mapping, i) for i in dots}
    rows = batches[dots[0]]
    reduced = [loops for loops in mapping.reduced_loops.values() if loops]
    matrix_loops = frozenset(range(len(mapping.loop_sizes))) - rows
    if not rows or not matrix_loops:
        problem = "no batch" if not rows else "matrices of a single element"
        raise BadFusion(f"{mapping.graph[dots[0]]} has {problem}; leave it to the library")
    if any(batch != rows for batch in batches.values()) or any(loops & rows for loops in reduced):
        raise BadFusion(
            f"operators {mapping.operators} do not all stay within one element of the batch of "
            f"{mapping.graph[dots[0]]}; put those that combine several elements of the batch into "
            "another kernel"
        )
    loop_sets = [*reduced, *(mapping.loops[i] for i in mapping.operators)]
    loop_sets += [side for i in dots for side in dot_loops(mapping, i)]
    by_membership: dict[tuple[bool, ...], list[int]] = {}
    for loop in sorted(matrix_loops):
        by_membership.setdefault(tuple(loop in loops for loops in loop_sets), []).append(loop)
    groups = tuple(tuple(loops) for loops in by_membership.values())
    for index in mapping.operators:
        _check_operator(mapping, index, rows, groups)
    return tuple(sorted(rows)), groups


def dot_loops(
    mapping: LoopMapping, index: int
) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
    """The loops of the m, n and k axes of dot ``index``, in this order."""
    *_, m, n = mapping.accesses[index]
    return frozenset(m.loops), frozenset(n.loops), mapping.reduced_loops[index]


def find_groups(loops: frozenset[int], groups: tuple[Loops, ...]) -> tuple[int, ...]:
    """Indices of the groups that contain any of ``loops``."""
    return tuple(at for at, group in enumerate(groups) if loops & set(group))


def _batch_loops(mapping: LoopMapping, index: int) -> frozenset[int]:
    *batch, _, _ = mapping.accesses[index]
    return frozenset(loop for access in batch for loop in access.loops)


def _check_operator(
    mapping: LoopMapping, index: int, rows: frozenset[int], groups: tuple[Loops, ...]
) -> None:
    """Raises :class:`BadFusion` if a tensor of the operator is no matrix of at most the maximum."""
    node = mapping.graph[index]
    tensors = [mapping.loops[index] | mapping.reduced_loops.get(index, frozenset())]
    if node.kind == "dot":
        m, n, k = dot_loops(mapping, index)
        if any(len(find_groups(side, groups)) > 1 for side in (m, n, k)):
            raise BadFusion(
                f"{node} has an axis that other operators split; give it its own kernel"
            )
        tensors = [m | k, k | n, m | n]
    for loops in tensors:
        tensor_groups = find_groups(loops - rows, groups)
        if len(tensor_groups) > 2:
            raise BadFusion(
                f"{node} has more than two axes for each element of the batch; give it its own "
                "kernel"
            )
        for group in tensor_groups:
            size = math.prod(mapping.loop_sizes[loop] for loop in groups[group])
            if size > MAX_MATRIX_AXIS:
                raise BadFusion(
                    f"{node} has matrices with {size} along an axis; a kernel with small "
                    f"dots allows at most {MAX_MATRIX_AXIS}; leave it to the library"
                )
