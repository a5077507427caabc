"""Hoisting of slices above elementwise calls: ``(a + b).chunk(2)`` becomes two sums of slices.

A kernel cannot read two parts of a value that it computes itself (such as the gates of a recurrent
cell, each a part of one sum). It can read two parts of ``a`` and ``b``, which are in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

_aten = torch.ops.aten
_SLICE = _aten.slice.Tensor
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)


def hoist_slices(original: GraphModule) -> GraphModule:
    """A copy that slices the operands of elementwise calls of which only slices are read.

    A module without such calls is returned as it is. Nodes carry fake tensors in ``meta["val"]``,
    new nodes too.
    """
    if not any(map(_can_hoist, original.graph.nodes)):
        return original
    module = GraphModule(original, copy.deepcopy(original.graph))
    # In reverse order, because a hoisted call leaves its operands with slices as only readers.
    for node in reversed(list(module.graph.nodes)):
        if _can_hoist(node):
            _hoist(module.graph, node)
    module.recompile()
    return module


def _can_hoist(node: Node) -> bool:
    """Whether a call is elementwise and only plain slices for elementwise calls read it."""
    if not _is_elementwise(node) or not node.users:
        return False
    is_sliced = all(user.target in _SPLITS or _is_plain_slice(user) for user in node.users)
    return is_sliced and all(
        _is_elementwise(user) for part in _parts(node) for user in part.node.users
    )


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.pointwise not in tags:
        return False
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    values = [operand.meta.get("val") for operand in (node, *node.all_input_nodes)]
    return all(
        isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
        for value in values
    )


def _is_plain_slice(node: Node) -> bool:
    """Whether a call is a slice with step 1 and a static, non-negative start."""
    if node.target is not _SLICE or node.kwargs:
        return False
    start, step = _argument(node, 2, None), _argument(node, 4, 1)
    return step == 1 and (start is None or (isinstance(start, int) and start >= 0))


def _argument(node: Node, place: int, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else default


@dataclass(frozen=True)
class _Part:
    """A part of a value that is read: ``size`` positions of ``axis`` from ``start`` on."""

    node: Node
    """The slice, or the getitem of a split, whose result is this part."""
    axis: int
    start: int
    size: int


def _parts(node: Node) -> Iterator[_Part]:
    rank = node.meta["val"].dim()
    for user in node.users:
        if user.target is _SLICE:
            axis = _argument(user, 1, 0) % rank
            size = user.meta["val"].shape[axis]
            # A slice that starts beyond the end is empty.
            start = min(_argument(user, 2, None) or 0, node.meta["val"].shape[axis] - size)
            yield _Part(user, axis, start, size)
            continue
        axis = (_argument(user, 2, None) or user.kwargs.get("dim", 0)) % rank
        sizes = [value.shape[axis] for value in user.meta["val"]]
        for item in user.users:
            place: Any = item.args[1]
            yield _Part(item, axis, sum(sizes[:place]), sizes[place])


def _hoist(graph: Graph, node: Node) -> None:
    """Replace an elementwise call by one call for each part of its result that is read."""
    for part in list(_parts(node)):

        def slice_operand(operand: Node, part: _Part = part) -> Node:
            return _insert_slice(graph, operand, part, node.meta["val"].dim())

        with graph.inserting_before(part.node):
            args, kwargs = map_arg((node.args, node.kwargs), slice_operand)
            new = graph.call_function(node.target, args, kwargs)
        values = map_arg((args, kwargs), lambda operand: operand.meta["val"])
        new.meta["val"] = node.target(*values[0], **values[1])
        part.node.replace_all_uses_with(new)
        graph.erase_node(part.node)
    for user in list(node.users):
        graph.erase_node(user)  # a split, whose getitems are gone
    graph.erase_node(node)


def _insert_slice(graph: Graph, operand: Node, part: _Part, rank: int) -> Node:
    """Insert the slice of an operand that broadcasts to a part of a result of rank ``rank``.

    Returns the operand itself if it is broadcast along the part's axis.
    """
    value = operand.meta["val"]
    axis = part.axis - (rank - value.dim())
    if axis < 0 or value.shape[axis] == 1:
        return operand
    sliced = graph.call_function(_SLICE, (operand, axis, part.start, part.start + part.size))
    sliced.meta["val"] = value.narrow(axis, part.start, part.size)
    return sliced
