"""Candidate patterns of each vertex: FusionStitching's approximate dynamic programming.

arXiv:2009.10924 visits the graph in post-order, consumers before producers. The candidates of a
vertex are the vertex itself together with patterns of its consumers. ``PatternReduction`` halves
the list of consumers, combines the best patterns of one half with the best of the other, and keeps
the top 3, so the cost of a vertex is linear in its consumers.

Our reading (the paper's text was not available): an input or opaque node is a vertex, too, with
candidates that contain its consumers but not the node itself. So operators that share nothing but a
source can get into one pattern. A union that is not convex is extended by the nodes between.
"""

from __future__ import annotations

from collections.abc import Sequence

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.graph.partition import Mask

TOP = 3
"""Patterns kept for each vertex."""

_Scored = tuple[float, Mask]
"""A pattern's gain in seconds and the pattern."""


def candidate_patterns(delta: DeltaEvaluator, top: int = TOP) -> dict[int, tuple[Mask, ...]]:
    """For each node: the best patterns with positive gain that start with it, best first.

    For an operator, the single operator follows as the last pattern.
    """
    graph = delta.graph
    candidates: dict[int, tuple[Mask, ...]] = {}
    operators = frozenset(graph.operators)
    for index in reversed(range(len(graph))):
        if graph[index].kind in ("layout", "constant"):
            continue
        own = 1 << index if index in operators else 0
        readers = (user for user in graph.consumers[index] if user in operators)
        groups = [candidates[user] for user in readers]
        reduced = _pattern_reduction(delta, own, groups, top)
        best = [mask for gain, mask in reduced if gain > 0 and mask & (mask - 1)][:top]
        candidates[index] = (*best, own) if own else tuple(best)
    return candidates


def _pattern_reduction(
    delta: DeltaEvaluator, own: Mask, groups: Sequence[tuple[Mask, ...]], top: int
) -> list[_Scored]:
    """``PatternReduction``: the best unions of ``own`` with patterns of the consumers' groups."""
    if not groups:
        return [(0.0, own)]
    if len(groups) == 1:
        unions = {own | mask for mask in groups[0]}
        options = []
    else:
        half = len(groups) // 2
        left = _pattern_reduction(delta, own, groups[:half], top)
        right = _pattern_reduction(delta, own, groups[half:], top)
        unions = {first | second for _, first in left for _, second in right}
        options = [*left, *right]
    legal = {mask: gain for gain, mask in options}
    for mask in unions:
        pattern = delta.convex_hull(mask)
        gain = delta.gain(pattern) if pattern else 0.0
        if gain is not None:
            legal[pattern] = gain
    legal[own] = 0.0
    ranked = sorted(((gain, mask) for mask, gain in legal.items()), key=_sort_key)
    return ranked[: top + 1]


def _sort_key(scored: _Scored) -> tuple[float, int, Mask]:
    gain, mask = scored
    return -gain, mask.bit_count(), mask
