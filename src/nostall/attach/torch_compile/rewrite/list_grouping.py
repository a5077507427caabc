"""Group equal updates of many tensors, written as a loop, to calls over lists.

An update is a connected part of pointwise calls that reads arguments of the graph, and values of
one element, and whose results the graph only returns or copies into its arguments: a step of an
optimiser, or of a moving average.  So no update depends on another one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from nostall.attach.torch_compile.rewrite.nodes import COPY, sort_nodes
from nostall.fusion.lists.calls import aten

FULL = torch.ops.aten.full.default
MIN_UPDATES = 4
"""Equal updates that become lists; fewer are left to other kernels."""
_BINARY = ("add", "sub", "mul", "div")
_UNARY = ["abs", "neg", "sqrt", "rsqrt", "reciprocal", "exp", "log", "sign", "tanh", "sigmoid"]

_LISTS: dict[Any, tuple[str, str]] = {
    **{
        aten(f"{name}.Tensor"): (f"_foreach_{name}.List", f"_foreach_{name}.Scalar")
        for name in _BINARY
    },
    **{aten(f"{name}.default"): (f"_foreach_{name}.default", "") for name in _UNARY},
    aten("maximum.default"): ("_foreach_maximum.List", ""),
    aten("minimum.default"): ("_foreach_minimum.List", ""),
    aten("addcmul.default"): ("_foreach_addcmul.Scalar", ""),
    aten("addcdiv.default"): ("_foreach_addcdiv.Scalar", ""),
    aten("pow.Tensor_Scalar"): ("", "_foreach_pow.Scalar"),
    aten("clamp_min.default"): ("", "_foreach_clamp_min.Scalar"),
    aten("clamp_max.default"): ("", "_foreach_clamp_max.Scalar"),
}
"""For an overload: that of lists with tensors as operands, and that with a number."""

Form = tuple[Any, ...]
"""What equal updates have in common; operands are numbered in the order of their first use."""


@dataclass(frozen=True)
class GroupedUpdates:
    """Equal updates that are calls over lists now."""

    lists: tuple[tuple[Node, Any], ...]
    """Each call over lists, with the overload of one tensor that it stands for."""
    tensors: int
    """Updates, of one tensor each."""


def group_updates(graph: Graph) -> list[GroupedUpdates]:
    """Replace equal updates by calls over lists; returns what was grouped."""
    by_form: dict[Form, list[list[Node]]] = {}
    for update in _updates(graph):
        form = _form(update)
        if form is not None:
            by_form.setdefault(form, []).append(update)
    grouped = [
        GroupedUpdates(_replace(graph, updates), len(updates))
        for updates in by_form.values()
        if len(updates) >= MIN_UPDATES
    ]
    if grouped:
        sort_nodes(graph)
    return grouped


def ungroup_updates(graph: Graph, grouped: Sequence[GroupedUpdates]) -> int:
    """Write calls over lists that no kernel has replaced as calls of one tensor again.

    Inductor would compile the lists in another way than the program's loop.  Returns how many
    tensors are in lists that kernels have replaced.
    """
    remaining = set(graph.nodes)
    replaced = 0
    for updates in grouped:
        kept = [(listed, target) for listed, target in updates.lists if listed in remaining]
        for listed, target in kept:
            _write_singly(graph, listed, target)
        replaced += updates.tensors if len(kept) < len(updates.lists) else 0
    return replaced


def _write_singly(graph: Graph, listed: Node, target: Any) -> None:
    """Replace a call over lists by a call for each result that is read.

    All stand in its place: behind it, arguments may have new values.
    """
    for item in list(listed.users):
        slot = item.args[1]
        assert isinstance(slot, int)
        args = [x[slot] if isinstance(x, (list, tuple)) else x for x in listed.args]
        with graph.inserting_before(listed):
            single = graph.call_function(target, tuple(args), dict(listed.kwargs))
        single.meta = dict(item.meta)
        item.replace_all_uses_with(single)
        graph.erase_node(item)
    graph.erase_node(listed)


def _updates(graph: Graph) -> Iterator[list[Node]]:
    """Groups of connected calls that have a ``_foreach_*`` overload, each in graph order."""
    calls = [node for node in graph.nodes if _overload(node) and _elements(node) > 1]
    inside = set(calls)
    seen: set[Node] = set()
    position = {node: at for at, node in enumerate(graph.nodes)}
    for call in calls:
        if call in seen:
            continue
        part, waiting = set[Node](), [call]
        while waiting:
            node = waiting.pop()
            if node not in part:
                part.add(node)
                waiting += [x for x in (*node.all_input_nodes, *node.users) if x in inside]
        seen |= part
        yield sorted(part, key=position.__getitem__)


def _form(update: Sequence[Node]) -> Form | None:
    """The form of a part; None if it is no update."""
    number = {node: at for at, node in enumerate(update)}
    shape, device = update[0].meta["val"].shape, update[0].meta["val"].device
    leaves: dict[Node, int] = {}
    rows = []
    for node in update:
        value = node.meta["val"]
        if value.shape != shape or value.device != device or not _is_only_written(node, number):
            return None
        if any(isinstance(x, Node) for x in node.kwargs.values()):
            return None
        row: list[Any] = [node.target, value.dtype]
        for operand in node.args:
            if not isinstance(operand, Node):
                row.append(("number", type(operand), operand))
            elif operand in number:
                row.append(("call", number[operand]))
            else:
                other = operand.meta.get("val")
                if not isinstance(other, torch.Tensor):  # a dynamic number
                    return None
                is_single = other.numel() == 1
                is_leaf = operand.op == "placeholder" or operand.target is FULL
                if other.device != device or not (is_single or (is_leaf and other.shape == shape)):
                    return None
                # A value of one element may be common to all updates, or one of each.
                place = leaves.setdefault(operand, len(leaves))
                number_of = operand.args[1] if operand.target is FULL else None
                row.append(("operand", place, other.dtype, is_single, number_of))
        rows.append((*row, tuple(sorted(node.kwargs.items()))))
    written = tuple(sum(user.target is COPY for user in node.users) for node in update)
    return (device, tuple(rows), written)


def _is_only_written(node: Node, inside: Any) -> bool:
    """Whether nodes outside of the part only return a result, or copy it into an argument."""
    others = [user for user in node.users if user not in inside]
    return all(
        user.op == "output" or (user.target is COPY and user.args[1] is node) for user in others
    )


def _replace(graph: Graph, updates: Sequence[Sequence[Node]]) -> tuple[tuple[Node, Any], ...]:
    """Replace each call of equal updates by one call over lists; returns them and the overloads."""
    made: list[tuple[Node, Any]] = []
    new: dict[Node, Node] = {}
    last = max((u[-1] for u in updates), key={n: i for i, n in enumerate(graph.nodes)}.__getitem__)
    after = last
    for calls in zip(*updates, strict=True):
        name = _overload(calls[0])
        args = []
        for place, operand in enumerate(calls[0].args):
            operands = [new.get(call.args[place], call.args[place]) for call in calls]
            args.append(operands if isinstance(operand, Node) else operand)
        with graph.inserting_after(after):
            listed = graph.call_function(aten(name), tuple(args), dict(calls[0].kwargs))
        listed.meta["val"] = [call.meta["val"] for call in calls]
        made.append((listed, calls[0].target))
        after = listed
        for slot, call in enumerate(calls):
            with graph.inserting_after(after):
                item = graph.call_function(operator.getitem, (listed, slot))
            item.meta = dict(call.meta)
            new[call] = after = item
    for old, item in new.items():
        old.replace_all_uses_with(item)
    for update in updates:
        for call in reversed(update):
            graph.erase_node(call)
    return tuple(made)


def _overload(node: Node) -> str:
    """Name of the ``_foreach_*`` overload for a call on one tensor; empty if there is none."""
    if node.op != "call_function" or node.target not in _LISTS:
        return ""
    with_tensors, with_number = _LISTS[node.target]
    if len(node.args) < 2:
        return with_tensors if isinstance(node.args[0], Node) else ""
    if len(node.args) > 2:
        return with_tensors if all(isinstance(x, Node) for x in node.args) else ""
    left, right = node.args
    if not isinstance(left, Node) or not isinstance(right, (Node, int, float)):
        return ""
    if isinstance(right, Node):
        return with_tensors
    return "" if node.kwargs else with_number


def _elements(node: Node) -> int:
    """The elements of a call's result; 0 if it is no tensor of static sizes."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0
    sizes = tuple(value.shape)
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
