"""Order of a graph's nodes around nodes that change tensors in place."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from nostall.attach.torch_compile.rewrite.node_order import random_edges, reorder
from nostall.attach.torch_compile.runtime.list_op import LISTS_OP

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
        if node.op == "call_function" and _mutates(node)
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


def _mutates(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)
