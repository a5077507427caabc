"""Topological order of a graph's nodes that keeps a given order as far as edges allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

from torch.fx import Node

from nostall.fusion.capture.memory import draws_random_numbers


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
