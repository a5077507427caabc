"""Candidate patterns of every operator: FusionStitching's approximate dynamic programming.

arXiv:2009.10924 visits the graph in post-order, consumers before producers.  The candidates of a
vertex are itself with patterns of its consumers; ``PatternReduction`` halves the consumers into
groups, combines the best of one with the best of the other, and keeps the top 3, so a vertex costs
as much as it has consumers.  Our reading (the paper's text is not at hand): an input or opaque node
is a vertex too, with candidates that hold its consumers without itself, so that operators that only
share what they read can meet; and a union that is not convex takes along what lies between.
"""

from __future__ import annotations

from collections.abc import Sequence

from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.graph.partition import Mask

TOP = 3

_Scored = tuple[float, Mask]


def candidates(delta: Delta, top: int = TOP) -> dict[int, tuple[Mask, ...]]:
    """Of every node the best patterns that begin with it, best first; of operators the last is the
    operator alone.  Patterns have a positive gain each."""
    graph = delta.graph
    found: dict[int, tuple[Mask, ...]] = {}
    operators = frozenset(graph.operators)
    for index in reversed(range(len(graph))):
        if graph[index].kind in ("layout", "constant"):
            continue
        own = 1 << index if index in operators else 0
        readers = (user for user in graph.consumers[index] if user in operators)
        groups = [found[user] for user in readers]
        reduced = _reduction(delta, own, groups, top)
        best = [mask for gain, mask in reduced if gain > 0 and mask & (mask - 1)][:top]
        found[index] = (*best, own) if own else tuple(best)
    return found


def _reduction(
    delta: Delta, own: Mask, groups: Sequence[tuple[Mask, ...]], top: int
) -> list[_Scored]:
    """``PatternReduction``: the best of ``own`` with patterns out of these consumers' groups."""
    if not groups:
        return [(0.0, own)]
    if len(groups) == 1:
        unions = {own | mask for mask in groups[0]}
        options = []
    else:
        half = len(groups) // 2
        left = _reduction(delta, own, groups[:half], top)
        right = _reduction(delta, own, groups[half:], top)
        unions = {one | two for _, one in left for _, two in right}
        options = [*left, *right]
    legal = {mask: gain for gain, mask in options}
    for mask in unions:
        whole = delta.hull(mask)
        gain = delta.gain(whole) if whole else 0.0
        if gain is not None:
            legal[whole] = gain
    legal[own] = 0.0
    ranked = sorted(((gain, mask) for mask, gain in legal.items()), key=_order)
    return ranked[: top + 1]


def _order(scored: _Scored) -> tuple[float, int, Mask]:
    gain, mask = scored
    return -gain, mask.bit_count(), mask
