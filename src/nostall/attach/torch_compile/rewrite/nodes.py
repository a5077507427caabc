"""Nodes of an FX graph: their values, what they change in place, and their order.

Nodes that change tensors in place limit the order: what reads the old value stays before them.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import py_sym_types

from nostall.attach.torch_compile.runtime.list_op import LISTS_OP
from nostall.fusion.capture.memory import draws_random_numbers, is_checkpointed_draw

# -- values ----------------------------------------------------------------------------------------


def fill_metadata(graph: Graph) -> None:
    """Compute ``meta["val"]`` of nodes that a pass added without it."""
    modes = [v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)]
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and modes:

            def value(operand: Node) -> Any:
                return operand.meta["val"]

            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), value)
            with modes[0]:
                node.meta["val"] = node.target(*args, **kwargs)


def fake_mode(nodes: Sequence[Node]) -> Any:
    """The fake mode of the nodes' tensors, as a context."""
    values = [node.meta["val"] for node in nodes]
    flat = [x for v in values for x in (v if isinstance(v, (list, tuple)) else [v])]
    modes = (getattr(value, "fake_mode", None) for value in flat)
    return next((mode for mode in modes if mode is not None), contextlib.nullcontext())


def erase_unused(graph: Graph) -> None:
    """Erase calls without users and without effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)


# -- changes in place ------------------------------------------------------------------------------

COPY = torch.ops.aten.copy_.default


def changed_tensors(node: Node) -> list[Node]:
    """The tensors that a node changes in place."""
    if node.target is COPY:
        return [x for x in node.args[:1] if isinstance(x, Node)]
    if node.target is LISTS_OP:
        changed = node.args[0]
        assert isinstance(changed, (list, tuple))
        return [x for x in changed if isinstance(x, Node)]
    return []


def changes_only_at_the_end(graph: Graph) -> bool:
    """Whether nodes that mutate are copies into arguments, and kernels over lists.

    Then each other node reads the value that an argument has before the graph runs.
    """
    return all(
        node.target in (COPY, LISTS_OP)
        and all(x.op == "placeholder" for x in changed_tensors(node))
        for node in graph.nodes
        if node.op == "call_function" and _has_mutable_schema(node)
    )


def readers(node: Node) -> Iterator[Node]:
    """The nodes that read a tensor, directly or by views of it."""
    waiting, seen = list(node.users), set[Node]()
    while waiting:
        user = waiting.pop()
        if user in seen:
            continue
        seen.add(user)
        yield user
        if _is_view(user):
            waiting.extend(user.users)


def viewed_tensor(node: Node) -> Node:
    """The tensor whose memory a node views; the node itself if it is no view."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_view(node: Node) -> bool:
    """Whether a node is a view of its first operand, or one of the views that a split makes."""
    if node.target is operator.getitem:
        first = node.args[0]
        return isinstance(first, Node) and _is_view(first)
    return bool(getattr(node.target, "is_view", False) and node.all_input_nodes)


def _mutates(node: Node) -> bool:
    """Whether a node may change memory that other nodes read.

    Calls without a schema may, unless they compute a number, as arithmetic of sizes does.
    """
    if node.op == "output":
        return True
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not hasattr(node.target, "_schema") and isinstance(node.meta.get("val"), py_sym_types):
        return False
    if is_checkpointed_draw(node.target):
        parts = [x for x in node.args if isinstance(x, torch._ops.OpOverload)]
        return len(parts) != 1 or parts[0]._schema.is_mutable
    return getattr(node.target, "_schema", None) is None or _has_mutable_schema(node)


def _has_mutable_schema(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


# -- order -----------------------------------------------------------------------------------------


class OrderingConflict(Exception):
    """No order of the nodes has all edges; the graph is unchanged."""


def random_edges(nodes: Sequence[Node]) -> list[tuple[Node, Node]]:
    """Edges that keep the order of the nodes that draw random numbers."""
    return list(pairwise(x for x in nodes if draws_random_numbers(x.target, x.args, x.kwargs)))


def reorder(nodes: Sequence[Node], successors: Mapping[Node, Sequence[Node]], reason: str) -> None:
    """Move all nodes of a graph so that each stands before its successors.

    Of the nodes that may come next, the first one in ``nodes`` does. Raises
    :class:`OrderingConflict` with ``reason`` if the edges have a cycle.
    """
    index = {node: at for at, node in enumerate(nodes)}
    waits = Counter(user for users in successors.values() for user in users)
    ready = [index[node] for node in nodes if not waits[node]]
    heapify(ready)
    ordered: list[Node] = []
    while ready:
        node = nodes[heappop(ready)]
        ordered.append(node)
        for user in successors[node]:
            waits[user] -= 1
            if not waits[user]:
                heappush(ready, index[user])
    if len(ordered) < len(nodes):
        raise OrderingConflict(reason)
    for before, after in pairwise(ordered):
        before.append(after)


def sort_nodes(graph: Graph) -> None:
    """Sort the nodes topologically, each reader of an old value before the node that changes it.

    Nodes otherwise keep their order, as those that draw random numbers do in any case.  Raises
    :class:`OrderingConflict` if that is impossible; the graph is then as it was.
    """
    nodes = list(graph.nodes)
    successors = {node: list(node.users) for node in nodes}
    for node in nodes:
        for tensor in changed_tensors(node):
            for reader in readers(tensor):
                if reader is not node and reader.op != "output":
                    successors[reader].append(node)
    for before, after in random_edges(nodes):
        successors[before].append(after)
    reorder(nodes, successors, "a value is read after the kernel that replaces it")


def sort_by_position(graph: Graph, position: dict[Node, int]) -> None:
    """Sort the nodes topologically, and by their positions as far as that allows.

    A node that mutates a tensor is a barrier: what was before it stays before it, and what was
    after it stays after it.  Nodes that draw random numbers keep their order.

    Raises :class:`OrderingConflict` if that is impossible.
    """
    nodes = sorted(graph.nodes, key=lambda node: position[node])
    index = {node: number for number, node in enumerate(nodes)}
    successors: dict[Node, list[Node]] = {node: list(node.users) for node in nodes}
    barriers = [-1, *(index[node] for node in nodes if _mutates(node)), len(nodes)]
    for low, high in pairwise(barriers):
        for node in nodes[low + 1 : high]:
            if low >= 0:
                successors[nodes[low]].append(node)
            if high < len(nodes):
                successors[node].append(nodes[high])
        if low >= 0 and high < len(nodes):
            successors[nodes[low]].append(nodes[high])
    for node, following in random_edges(nodes):
        successors[node].append(following)
    reorder(
        nodes,
        successors,
        "a kernel depends on a mutation or a random number that depends on the kernel",
    )
