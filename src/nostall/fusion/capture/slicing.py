"""What only slices of are read is computed slice by slice: ``(a + b).chunk(2)`` as two sums.

A kernel cannot read a value that it computes at two places (the gates of a recurrent cell, each a
part of one sum); of ``a`` and ``b``, which lie in memory, it can.
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


def sliced_first(given: GraphModule) -> GraphModule:
    """A copy in which elementwise calls stand behind the slices and splits that alone read them.

    A module without such calls is given back as it is.  Nodes carry fake tensors in
    ``meta["val"]``, new ones too.
    """
    if not any(map(_moves, given.graph.nodes)):
        return given
    module = GraphModule(given, copy.deepcopy(given.graph))
    # The last call first: what stands before it is then read by slices only, too.
    for node in reversed(list(module.graph.nodes)):
        if _moves(node):
            _move(module.graph, node)
    module.recompile()
    return module


def _moves(node: Node) -> bool:
    """Whether a call is elementwise, plain slices alone read it, and elementwise calls those."""
    if not _is_elementwise(node) or not node.users:
        return False
    slices = all(user.target in _SPLITS or _is_plain(user) for user in node.users)
    return slices and all(
        _is_elementwise(user) for part in _parts(node) for user in part.node.users
    )


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    if node.op != "call_function" or torch.Tag.pointwise not in tags:
        return False
    if torch.Tag.nondeterministic_seeded in tags:
        return False
    values = [one.meta.get("val") for one in (node, *node.all_input_nodes)]
    return all(
        isinstance(value, torch.Tensor) and all(isinstance(size, int) for size in value.shape)
        for value in values
    )


def _is_plain(node: Node) -> bool:
    """Whether a slice has steps of 1 and begins at a number counted from 0."""
    if node.target is not _SLICE or node.kwargs:
        return False
    start, step = _argument(node, 2, None), _argument(node, 4, 1)
    return step == 1 and (start is None or (isinstance(start, int) and start >= 0))


def _argument(node: Node, place: int, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else default


@dataclass(frozen=True)
class _Part:
    """What is read of a value: ``size`` places of an axis from ``start`` on, as ``node``."""

    node: Node
    axis: int
    start: int
    size: int


def _parts(node: Node) -> Iterator[_Part]:
    rank = node.meta["val"].dim()
    for user in node.users:
        if user.target is _SLICE:
            axis = _argument(user, 1, 0) % rank
            size = user.meta["val"].shape[axis]
            # A slice that begins beyond the end is empty.
            start = min(_argument(user, 2, None) or 0, node.meta["val"].shape[axis] - size)
            yield _Part(user, axis, start, size)
            continue
        axis = (_argument(user, 2, None) or user.kwargs.get("dim", 0)) % rank
        sizes = [value.shape[axis] for value in user.meta["val"]]
        for item in user.users:
            place: Any = item.args[1]
            yield _Part(item, axis, sum(sizes[:place]), sizes[place])


def _move(graph: Graph, node: Node) -> None:
    """Compute each part of an elementwise call by itself, and the whole no more."""
    for part in list(_parts(node)):

        def narrowed(operand: Node, part: _Part = part) -> Node:
            return _narrowed(graph, operand, part, node.meta["val"].dim())

        with graph.inserting_before(part.node):
            args, kwargs = map_arg((node.args, node.kwargs), narrowed)
            made = graph.call_function(node.target, args, kwargs)
        values = map_arg((args, kwargs), lambda one: one.meta["val"])
        made.meta["val"] = node.target(*values[0], **values[1])
        part.node.replace_all_uses_with(made)
        graph.erase_node(part.node)
    for user in list(node.users):
        graph.erase_node(user)  # a split
    graph.erase_node(node)


def _narrowed(graph: Graph, operand: Node, part: _Part, rank: int) -> Node:
    """The part of an operand that broadcasts to a part of the result of this rank."""
    value = operand.meta["val"]
    axis = part.axis - (rank - value.dim())
    if axis < 0 or value.shape[axis] == 1:
        return operand
    made = graph.call_function(_SLICE, (operand, axis, part.start, part.start + part.size))
    made.meta["val"] = value.narrow(axis, part.start, part.size)
    return made
