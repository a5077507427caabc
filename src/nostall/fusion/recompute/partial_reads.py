"""Parts of computed values, computed from parts of what the values depend on.

A kernel cannot read two parts of a value that it computes, such as the halves of a normalised query
in its rotary embedding.  It can read two parts of a tensor in memory.  So a slice of ``x * scale``
becomes the product of a slice of ``x`` and of ``scale``, which is computed again for the part.
"""

from __future__ import annotations

import math
from dataclasses import replace

from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPUTE, ELEMENTWISE
from nostall.fusion.graph.shapes import contiguous_strides
from nostall.fusion.recompute.copies import NOT_COPIED, GraphCopier
from nostall.fusion.recompute.rounding import may_change_decisions

MAX_PART_COPIES = 64
"""Most elementwise operators that may be computed again for one part of a value."""
MAX_PASSES, MAX_OPERATORS = 5, 512
"""A part of a value may be computed from parts of values that are computed, too, and so on: so many
times, in graphs of so many operators."""


def read_nested_parts(graph: Graph) -> tuple[Graph, tuple[int | None, ...]] | None:
    """The same as :func:`read_parts`, also for parts of parts, as in recurrences of neighbours."""
    found: tuple[Graph, tuple[int | None, ...]] | None = None
    for _ in range(MAX_PASSES):
        current = found[0] if found else graph
        changed = read_parts(current)
        if changed is None or len(changed[0].operators) > MAX_OPERATORS:
            break
        before = found[1] if found else tuple(range(len(graph)))
        origins = (None if at is None else before[at] for at in changed[1])
        found = changed[0], tuple(origins)
    return found


def read_parts(graph: Graph) -> tuple[Graph, tuple[int | None, ...]] | None:
    """The graph with slices of computed values replaced by operators on slices of their operands.

    A slice stays if what it depends on cannot be sliced: a reduction along its axis, a view of a
    computed value.  It also stays if a discontinuous operator depends on how it is rounded.
    Returns None if all stay; otherwise the graph, and the node of ``graph`` that has the same value
    as each of its nodes (None for parts).
    """
    copier = GraphCopier(graph, range(len(graph)))
    changed = False
    for node in graph:
        inputs = [copier.position[index] for index in node.inputs]
        if _is_part_of_computed_value(graph, node) and _sliced(graph, node) is not None:
            part = _Slicer(copier, node).slice(node.inputs[0], _axis(node))
            copier.position[node.index] = part
            changed = True
        else:
            copier.keep(node.index, inputs)
    return copier.finish() if changed else None


def _axis(node: Node) -> int:
    """The axis of a slice."""
    axis = node["dim"]
    assert isinstance(axis, int)
    return axis


def _is_part_of_computed_value(graph: Graph, node: Node) -> bool:
    if node.op != "slice" or graph[graph.base(node.inputs[0])].kind not in ELEMENTWISE:
        return False
    axis = _axis(node)
    sizes = (node.shape[axis], graph[node.inputs[0]].shape[axis])
    return not any(varies(size, graph.varying) for size in sizes)


def views_of_parts(graph: Graph) -> frozenset[int]:
    """Views of which parts are read, and that are inputs of the regions that read them.

    These are views that :func:`read_parts` would slice, and those of which an axis is sliced that
    the view has split off or put together, such as halves of the heads of a projection.  A kernel
    cannot read a slice of such an axis, but a slice of a tensor of that shape.  So a computed value
    that is read by such a view is written to memory, and another region reads the view.  Slices
    that no operator reads do not count.
    """
    parts = (node for node in graph if _is_part_of_computed_value(graph, node))
    read = {index for part in parts for index in _sliced(graph, part, by_regions=True) or ()}
    views = {index for index in read if graph[index].op == "view"}
    sliced = (_split_view(graph, graph[index]) for index in _layouts_of_operands(graph))
    return frozenset(views.union(view for view in sliced if view is not None))


def _layouts_of_operands(graph: Graph) -> set[int]:
    """Slices, views and the like that operators read, directly or through others."""
    found: set[int] = set()
    for operator in graph.operators:
        for index in graph[operator].inputs:
            while graph[index].kind == "layout" and index not in found:
                found.add(index)
                index = graph[index].inputs[0]
    return found


def _split_view(graph: Graph, node: Node) -> int | None:
    """The view that has split off, or put together, the axis that a node slices."""
    if node.op != "slice":
        return None
    index, axis = node.inputs[0], _axis(node)
    while axis >= 0 and graph[index].kind == "layout":
        if _separates(graph, graph[index], axis, node):
            return index
        below = graph[index].inputs[0]
        axis = _operand_axis(graph, graph[index], below, axis)
        index = below
    return None


def _separates(graph: Graph, view: Node, axis: int, part: Node) -> bool:
    """Whether a part of a view along an axis can be read only if the view is an input.

    Views of computed values stay in the kernel that computes them if the part of the view is a part
    with a constant step of one axis below it: one position, or the outermost axis of several.
    """
    if view.op != "view" or view.shape[axis] == 1 or _axis_below_view(graph, view, axis) >= 0:
        return False
    if graph[graph.base(view.index)].kind not in COMPUTE:
        return True
    below = graph[view.inputs[0]].shape
    inner = math.prod(view.shape[axis + 1 :])
    for at, size in enumerate(below):
        inside = math.prod(below[at + 1 :])
        outer = size * inside
        if inner % inside == 0 and outer % (inner * view.shape[axis]) == 0:
            is_outermost = outer == inner * view.shape[axis] and part["step"] == 1
            return part.shape[_axis(part)] > 1 and not is_outermost
    return True


def _axis_below_view(graph: Graph, view: Node, axis: int) -> int:
    """The axis of the tensor below a view that is an axis of the view; -1 if there is none."""
    sizes, inner = graph[view.inputs[0]].shape, math.prod(view.shape[axis + 1 :])
    for at, size in enumerate(sizes):
        if (size, math.prod(sizes[at + 1 :])) == (view.shape[axis], inner):
            return at
    return -1


def _sliced(graph: Graph, part: Node, *, by_regions: bool = False) -> set[int] | None:
    """The values in memory, or views of them, of which a part is read for a part of a value.

    ``by_regions``: views of computed values are in memory if only another region can read the part.
    None if something that the part depends on along its axis cannot be sliced, or if the part may
    round otherwise than the whole value and a discontinuous operator depends on it.
    """
    leaves: set[int] = set()
    copies: set[tuple[int, int]] = set()
    pending = [(part.inputs[0], _axis(part))]
    while pending:
        index, axis = pending.pop()
        node = graph[index]
        if (index, axis) in copies or axis < 0 or node.shape[axis] == 1:
            continue
        if _is_read_in_parts(graph, index):
            leaves.add(index)
            continue
        if by_regions and _separates(graph, node, axis, part):
            leaves.add(index)
            continue
        if not _has_parts(node):
            return None
        copies.add((index, axis))
        pending += [(i, _operand_axis(graph, node, i, axis)) for i in node.inputs]
    copied = {index for index, _ in copies}
    if not copied or sum(graph[i].kind in ELEMENTWISE for i, _ in copies) > MAX_PART_COPIES:
        return None
    return None if may_change_decisions(graph, copied, [part.index]) else leaves


def _is_read_in_parts(graph: Graph, index: int) -> bool:
    """Whether a kernel can read a part of a value: of one in memory, or of a part of a value, which
    is a part of that value, too."""
    return graph[index].op == "slice" or graph[graph.base(index)].kind in ("input", "opaque")


def _has_parts(node: Node) -> bool:
    """Whether a part of a node can be computed from parts of its operands."""
    is_elementwise = node.kind in ELEMENTWISE and node.op not in NOT_COPIED
    return is_elementwise or node.op in ("permute", "expand")


def _operand_axis(graph: Graph, node: Node, operand: int, axis: int) -> int:
    """The axis of an operand that is an axis of the node; negative if the operand has none."""
    if node.op == "permute":
        return node.dims[axis]
    if node.op == "view":
        return _axis_below_view(graph, node, axis)
    return axis - len(node.shape) + len(graph[operand].shape)


class _Slicer:
    """Adds the part of a value, and what it is computed from, to a copy of the graph."""

    def __init__(self, copier: GraphCopier, part: Node) -> None:
        self._copier, self._part = copier, part
        self._size = part.shape[_axis(part)]
        self._known: dict[tuple[int, int], int] = {}

    def slice(self, index: int, axis: int) -> int:
        """The node of the copy for the part of a value along ``axis``."""
        graph = self._copier.graph
        node = graph[index]
        if axis < 0 or node.shape[axis] == 1:
            return self._copier.position[index]
        if (index, axis) not in self._known:
            if _is_read_in_parts(graph, index):
                added = self._slice_of_input(index, axis)
            else:
                operands = [self.slice(i, _operand_axis(graph, node, i, axis)) for i in node.inputs]
                shape = (*node.shape[:axis], self._size, *node.shape[axis + 1 :])
                added = self._copier.copy(index, operands, shape)
            self._known[index, axis] = added
        return self._known[index, axis]

    def _slice_of_input(self, index: int, axis: int) -> int:
        node = self._copier.graph[index]
        shape = (*node.shape[:axis], self._size, *node.shape[axis + 1 :])
        attributes = dict(self._part.attributes) | {"dim": axis}
        return self._copier.add(
            replace(
                self._part,
                inputs=(self._copier.position[index],),
                shape=shape,
                dtype=node.dtype,
                strides=contiguous_strides(shape),
                attributes=tuple(sorted(attributes.items())),
            )
        )
