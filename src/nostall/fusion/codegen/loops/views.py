"""Accesses through views: translate the index of a view into the index of the tensor below it.

A view moves no bytes, so no kernel materializes one: every reader of a view reads the tensor
below the chain of views at the corresponding index.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nostall.fusion.codegen.loops.axes import AxisGroup, regroup
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph, Node


@dataclass(frozen=True)
class AccessDraft:
    """The index of one tensor axis before the loops are known: ``start + step * i``.

    ``i`` is the joint index of ``axes``.
    """

    axes: AxisGroup
    start: int = 0
    step: int = 1

    def covers_axis(self, size: int) -> bool:
        """Whether the access reads an axis of ``size`` completely and in order."""
        return math.prod(a.size for a in self.axes) == size and (self.start, self.step) == (0, 1)


AccessDrafts = tuple[AccessDraft, ...]


def resolve_views(graph: Graph, index: int, accesses: AccessDrafts) -> tuple[int, AccessDrafts]:
    """The node below the views of node ``index``, and its index if the view is at ``accesses``."""
    while graph[index].kind == "layout":
        node = graph[index]
        below = graph[node.inputs[0]]
        if node.op == "permute":
            by_axis = dict(zip(node.dims, accesses, strict=True))
            accesses = tuple(by_axis[axis] for axis in range(len(accesses)))
        elif node.op == "expand":
            aligned = accesses[len(accesses) - len(below.shape) :]
            accesses = tuple(
                access if size > 1 else AccessDraft(())
                for access, size in zip(aligned, below.shape, strict=True)
            )
        elif node.op == "slice":
            accesses = _access_below_slice(node, accesses)
        else:
            accesses = _access_below_view(node, below, accesses)
        index = below.index
    return index, accesses


def _access_below_slice(node: Node, accesses: AccessDrafts) -> AccessDrafts:
    dim, start, step = node["dim"], node["start"], node["step"]
    assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
    access = accesses[dim]
    sliced = AccessDraft(access.axes, start + step * access.start, step * access.step)
    return (*accesses[:dim], sliced, *accesses[dim + 1 :])


def _access_below_view(node: Node, below: Node, accesses: AccessDrafts) -> AccessDrafts:
    """The index below a reshape: runs of axes with equal products are regrouped."""
    above = [(s, access) for s, access in zip(node.shape, accesses, strict=True) if s > 1]
    below_sizes = [size for size in below.shape if size > 1]
    result: list[AccessDraft] = []
    i = j = 0
    while i < len(above):
        run, sizes = [above[i]], [below_sizes[j]]
        i, j = i + 1, j + 1
        while (above_product := math.prod(s for s, _ in run)) != (
            below_product := math.prod(sizes)
        ):
            if above_product < below_product:
                run.append(above[i])
                i += 1
            else:
                sizes.append(below_sizes[j])
                j += 1
        if len(run) == len(sizes) == 1:
            result.append(run[0][1])
            continue
        if not all(access.covers_axis(size) for size, access in run):
            merged = _merge_axes(run) if len(sizes) == 1 else None
            if merged is None:
                raise BadFusion(f"{node} is a view of a slice; put them into different kernels")
            result.append(merged)
            continue
        axes = [axis for _, access in run for axis in access.axes]
        result.extend(AccessDraft(group) for group in regroup(axes, sizes))
    remaining = iter(result)
    return tuple(next(remaining) if size > 1 else AccessDraft(()) for size in below.shape)


def _merge_axes(run: list[tuple[int, AccessDraft]]) -> AccessDraft | None:
    """One access to the axis that adjacent axes form, from (size, access) of each of them.

    None if the merged access has no constant step.  A slice that takes one of several adjacent
    matrices has one.
    """
    axes: AxisGroup = ()
    start, step, inner = 0, 0, 1
    for size, access in reversed(run):
        start += access.start * inner
        if access.axes:
            if axes and access.step * inner != step * math.prod(axis.size for axis in axes):
                return None
            step = step or access.step * inner
            axes = (*access.axes, *axes)
        inner *= size
    return AccessDraft(axes, start, step or 1)
