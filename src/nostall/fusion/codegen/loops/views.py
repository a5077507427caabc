"""Reading through views: where the memory under a chain of views is read.

Views move no bytes, so kernels carry them: a value that is read at some place of a view is read at
the corresponding place of what the view shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nostall.fusion.codegen.loops.axes import AxisGroup, regroup
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph, Node


@dataclass(frozen=True)
class AccessDraft:
    """Where one axis of a tensor is read, before the loops are known: ``start + step * i``."""

    axes: AxisGroup
    start: int = 0
    step: int = 1

    def covers_axis(self, size: int) -> bool:
        """Whether it goes through the whole axis of ``size``, in order."""
        return math.prod(a.size for a in self.axes) == size and (self.start, self.step) == (0, 1)


AccessDrafts = tuple[AccessDraft, ...]


def resolve_views(graph: Graph, index: int, places: AccessDrafts) -> tuple[int, AccessDrafts]:
    """The node under a chain of views, and where it is read when ``index`` is at ``places``."""
    while graph[index].kind == "layout":
        node = graph[index]
        below = graph[node.inputs[0]]
        if node.op == "permute":
            back = dict(zip(node.dims, places, strict=True))
            places = tuple(back[axis] for axis in range(len(places)))
        elif node.op == "expand":
            aligned = places[len(places) - len(below.shape) :]
            places = tuple(
                place if size > 1 else AccessDraft(())
                for place, size in zip(aligned, below.shape, strict=True)
            )
        elif node.op == "slice":
            places = _access_below_slice(node, places)
        else:
            places = _access_below_view(node, below, places)
        index = below.index
    return index, places


def _access_below_slice(node: Node, places: AccessDrafts) -> AccessDrafts:
    dim, start, step = node["dim"], node["start"], node["step"]
    assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
    old = places[dim]
    cut = AccessDraft(old.axes, start + step * old.start, step * old.step)
    return (*places[:dim], cut, *places[dim + 1 :])


def _access_below_view(node: Node, below: Node, places: AccessDrafts) -> AccessDrafts:
    """Places in the tensor under a view: axes in runs of equal product are regrouped."""
    above = [(s, p) for s, p in zip(node.shape, places, strict=True) if s > 1]
    under = [size for size in below.shape if size > 1]
    found: list[AccessDraft] = []
    i = j = 0
    while i < len(above):
        run, sizes = [above[i]], [under[j]]
        i, j = i + 1, j + 1
        while (have := math.prod(s for s, _ in run)) != (want := math.prod(sizes)):
            if have < want:
                run.append(above[i])
                i += 1
            else:
                sizes.append(under[j])
                j += 1
        if len(run) == len(sizes) == 1:
            found.append(run[0][1])
            continue
        if not all(place.covers_axis(size) for size, place in run):
            one = _merge_axes(run) if len(sizes) == 1 else None
            if one is None:
                raise BadFusion(f"{node} is a view of a slice; put them into different kernels")
            found.append(one)
            continue
        row = [axis for _, place in run for axis in place.axes]
        found.extend(AccessDraft(group) for group in regroup(row, sizes))
    rest = iter(found)
    return tuple(next(rest) if size > 1 else AccessDraft(()) for size in below.shape)


def _merge_axes(run: list[tuple[int, AccessDraft]]) -> AccessDraft | None:
    """Places on neighbouring axes, of these lengths, as a place on the axis that they form; None
    where that is not walked in equal steps.  One of several matrices side by side is."""
    row: AxisGroup = ()
    start, step, inner = 0, 0, 1
    for size, place in reversed(run):
        start += place.start * inner
        if place.axes:
            if row and place.step * inner != step * math.prod(axis.size for axis in row):
                return None
            step = step or place.step * inner
            row = (*place.axes, *row)
        inner *= size
    return AccessDraft(row, start, step or 1)
