"""Pairwise joining of a partition's kernels in the order of a score.

Kernels share data if an operator reads one of the other kernel, or both read the same source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore.contraction import ContractedGraph
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, Partition, members, to_mask


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


def join_kernels(
    delta: DeltaEvaluator, partition: Partition, score: Score, max_rounds: int
) -> Partition:
    """Join pairs of kernels that share data, best score first, until nothing changes.

    Each round scores all pairs once. It skips a pair if one of its kernels was joined earlier in
    the round, if the joined kernel is illegal, or if it would form a cycle.
    """
    sharing = neighbours(delta.graph)
    owner = {index: mask for mask in partition.groups for index in members(mask)}
    kernels = ContractedGraph(delta.graph)
    for mask in partition.groups:
        kernels.add(mask)
    for _ in range(max_rounds):
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
