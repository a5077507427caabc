"""Pairwise joining of a partition's kernels in the order of a score.

Kernels share data if an operator reads one of the other kernel, or both read the same source.
A contracted graph of the kernels shows whether one more kernel keeps it acyclic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import (
    Mask,
    Partition,
    kernel_inputs,
    kernel_outputs,
    members,
    to_mask,
)


class ContractedGraph:
    """A graph in which each selected kernel is one node; other operators stay single nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.owner: dict[int, Mask] = {}
        """The kernel of each operator that is in a kernel of several operators."""
        self.grouped: Mask = 0
        """All operators in ``owner``."""
        self.reach = list(range(len(graph)))
        """For each node: the last operator of the kernels that start at or before it and end after
        it; the node itself if there are none."""

    def copy(self) -> ContractedGraph:
        """A contracted graph with the same kernels."""
        copy = ContractedGraph(self.graph)
        copy.owner, copy.grouped, copy.reach = dict(self.owner), self.grouped, self.reach.copy()
        return copy

    def add(self, mask: Mask) -> None:
        """Select a kernel. It must be disjoint from the others, and :meth:`admits` must be true."""
        if mask & (mask - 1):
            inside = members(mask)
            self.owner.update(dict.fromkeys(inside, mask))
            self.grouped |= mask
            for index in range(inside[0], inside[-1]):
                self.reach[index] = max(self.reach[index], inside[-1])

    def remove(self, mask: Mask) -> None:
        """Deselect a kernel; its operators become single nodes again."""
        if mask & (mask - 1):
            for index in members(mask):
                del self.owner[index]
            self.grouped &= ~mask
            # `reach` is not reduced: a value that is too large costs time, not correctness.

    def admits(self, mask: Mask) -> bool:
        """Whether no path through other kernels leaves a convex set and returns to it."""
        if not mask & (mask - 1):
            return True  # a single node already
        graph = self.graph
        above = below = 0
        for index in members(mask):
            above |= graph.ancestors[index]
            below |= graph.descendants[index]
        # Such a path enters a kernel below the set and leaves a kernel above the set.
        if not below & ~mask & self.grouped or not above & ~mask & self.grouped:
            return True
        # Edges lead to later nodes, and no kernel leads from after `last` to a node before it. So
        # the search can ignore all nodes after `last`.
        last = mask.bit_length() - 1
        while self.reach[last] > last:
            last = self.reach[last]
        pending = [u for i in members(mask) for u in graph.consumers[i] if not mask >> u & 1]
        seen = mask
        while pending:
            index = pending.pop()
            if seen >> index & 1 or index > last:
                continue
            kernel = self.owner.get(index, 1 << index)
            seen |= kernel
            for member in members(kernel):
                for user in graph.consumers[member]:
                    if mask >> user & 1:
                        return False
                    pending.append(user)
        return True


def neighbours(graph: Graph) -> dict[int, Mask]:
    """For each operator: a mask of the operators that it shares data with."""
    masks = dict.fromkeys(graph.operators, 0)
    for node in graph:
        readers = [user for user in graph.consumers[node.index] if user in masks]
        sharing = to_mask(readers)
        if node.index in masks:
            masks[node.index] |= sharing
            sharing |= 1 << node.index
        for reader in readers:
            masks[reader] |= sharing & ~(1 << reader)
    return masks


Score = Callable[[Mask, Mask], float | None]
"""Score of joining two kernels; a pair with None or a score of at most 0 is not joined."""


MAX_ROUNDS = 10


def join_kernels(delta: DeltaEvaluator, partition: Partition, score: Score) -> Partition:
    """Join pairs of kernels that share data, best score first, until nothing changes.

    Each of at most :data:`MAX_ROUNDS` rounds scores all pairs once. It skips a pair if one of its
    kernels was joined earlier in the round, if the joined kernel is illegal, or if it would form a
    cycle.
    """
    sharing = neighbours(delta.graph)
    owner = {index: mask for mask in partition.groups for index in members(mask)}
    kernels = ContractedGraph(delta.graph)
    for mask in partition.groups:
        kernels.add(mask)
    for _ in range(MAX_ROUNDS):
        changed = False
        for first, second in _ranked_pairs(owner, sharing, score):
            if owner[_lowest(first)] != first or owner[_lowest(second)] != second:
                continue
            joined = first | second
            if delta.can_fuse(joined) and _join(kernels, first, second):
                owner.update(dict.fromkeys(members(joined), joined))
                changed = True
        if not changed:
            break
    return Partition.from_groups(set(owner.values()))


def _ranked_pairs(
    owner: Mapping[int, Mask], sharing: Mapping[int, Mask], score: Score
) -> list[tuple[Mask, Mask]]:
    """Pairs of kernels that share data and have a positive score, best first."""
    pairs = {
        (owner[one], owner[other])
        for one in owner
        for other in members(sharing[one] & ~owner[one])
        if owner[one] < owner[other]
    }
    scores = ((score(first, second), first, second) for first, second in pairs)
    ranked = sorted(
        (-value, first, second) for value, first, second in scores if value and value > 0
    )
    return [(first, second) for _, first, second in ranked]


def _join(kernels: ContractedGraph, first: Mask, second: Mask) -> bool:
    """Join two kernels unless that forms a cycle; returns whether it joined them."""
    kernels.remove(first)
    kernels.remove(second)
    is_acyclic = kernels.admits(first | second)
    for mask in (first | second,) if is_acyclic else (first, second):
        kernels.add(mask)
    return is_acyclic


def _lowest(mask: Mask) -> int:
    return (mask & -mask).bit_length() - 1


def greedy_partition(delta: DeltaEvaluator) -> Partition:
    """Fuse pairs of kernels by saved bytes: the baseline, which works like Inductor's scheduler.

    Inductor's ``fuse_nodes`` runs up to ten rounds. In each round it sorts the pairs of kernels
    that share data by the bytes that fusing them saves, and fuses them in that order if that is
    legal. There is no time model. The baseline differs in one point: legal is what nostall can
    generate, which is more than what Inductor fuses.
    """
    graph = delta.graph

    def moved_bytes(mask: Mask) -> int:
        nodes = (*kernel_inputs(graph, mask), *kernel_outputs(graph, mask))
        return sum(graph[index].bytes for index in nodes)

    def saved_bytes(first: Mask, second: Mask) -> float:
        return float(moved_bytes(first) + moved_bytes(second) - moved_bytes(first | second))

    return join_kernels(delta, Partition.unfused(graph), saved_bytes)
