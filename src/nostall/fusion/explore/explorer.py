"""FusionStitching's explorer: candidate patterns, beam search, joining, packing, final selection.

Our reading of the last step of arXiv:2009.10924: a pattern of the dynamic programming starts at one
vertex. Kernels that start at several vertices arise afterwards by joining patterns: first patterns
that share data, as long as that gains, then independent ones (kernel packing). The result depends
on which pair is joined first. Two orders are tried: the largest gain first, and the pair closest to
the graph's results first.

Kernel packing: independent kernels become one launch (remote fusion in arXiv:2009.10924).

Kernels of equal depth in the contracted graph do not depend on each other, and each edge leads to a
greater depth. So packing kernels of equal depth keeps the partition acyclic.

Candidate patterns of each vertex: FusionStitching's approximate dynamic programming.

arXiv:2009.10924 visits the graph in post-order, consumers before producers. The candidates of a
vertex are the vertex itself together with patterns of its consumers. ``PatternReduction`` halves
the list of consumers, combines the best patterns of one half with the best of the other, and keeps
the top 3, so the cost of a vertex is linear in its consumers.

Our reading (the paper's text was not available): an input or opaque node is a vertex, too, with
candidates that contain its consumers but not the node itself. So operators that share nothing but a
source can get into one pattern. A union that is not convex is extended by the nodes between.

Beam search of width 3 for a partition made of candidate patterns (arXiv:2009.10924).

The search visits nodes in topological order. If no selected pattern contains a node yet, the node
starts one of its candidate patterns or stays single. Our reading: partial partitions cover
different operators, so the search compares their gains plus an upper bound on what the uncovered
operators can still gain. The bound takes, for each operator, the best gain per operator of all
candidates that contain it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nostall.core import Budget
from nostall.fusion.errors import BadFusion
from nostall.fusion.evaluate.delta import DeltaEvaluator, DeltaObjective
from nostall.fusion.evaluate.latency import LatencyEvaluator
from nostall.fusion.explore.joining import ContractedGraph, Score, join_kernels
from nostall.fusion.explore.space import PartitionSpace
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.partition import Mask, Partition, members
from nostall.search import Anneal


def pack_kernels(delta: DeltaEvaluator, partition: Partition) -> Partition:
    """The partition with kernels of equal depth packed first-fit, if the evaluator sees a gain."""
    groups = []
    for kernels in _kernels_by_depth(delta, partition).values():
        packs: list[Mask] = []
        for mask in kernels:
            for at, pack in enumerate(packs):
                if _pays(delta, pack, mask):
                    packs[at] = pack | mask
                    break
            else:
                packs.append(mask)
        groups += packs
    return Partition.from_groups(groups)


def _pays(delta: DeltaEvaluator, first: Mask, second: Mask) -> bool:
    packed = delta.gain(first | second)
    if packed is None:
        return False
    separate = (delta.gain(first) or 0.0) + (delta.gain(second) or 0.0)
    return packed > separate and delta.can_fuse(first | second)


def _kernels_by_depth(delta: DeltaEvaluator, partition: Partition) -> dict[int, list[Mask]]:
    """Kernels by depth: the length of the longest chain of kernels and opaque nodes to them."""
    graph = delta.graph
    opaque = [(node.index,) for node in graph if node.kind == "opaque"]
    steps = [*partition.kernels, *opaque]
    order = graph.execution_order(steps)
    if order is None:
        raise BadFusion(
            "kernels of the partition depend on each other in a cycle; call check() on it first"
        )
    depth: dict[int, int] = {}
    kernels: defaultdict[int, list[Mask]] = defaultdict(list)
    for at in order:
        inside = set(steps[at])
        sources = {source for index in steps[at] for source in graph.sources[index]} - inside
        level = 1 + max((depth.get(source, 0) for source in sources), default=0)
        depth.update(dict.fromkeys(steps[at], level))
        if at < len(partition):
            kernels[level].append(partition.groups[at])
    return kernels


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


WIDTH = 3
_BOUND_WEIGHT = 0.95
"""Weight of the bound beside the gain: below 1, so that a realized gain beats an equal bound."""


@dataclass(frozen=True, slots=True)
class _Partial:
    """A partial partition: its last pattern and a link to the state before."""

    covered: Mask
    """Operators of the selected patterns."""
    gain: float
    """Gain of the selected patterns, in seconds."""
    bound: float
    """Upper bound on the gain of the operators that are not covered, in seconds."""
    kernels: ContractedGraph
    """The selected patterns; without the last one until the state survives (`_settled`)."""
    pattern: Mask = 0
    """The last selected pattern."""
    previous: _Partial | None = None


def _priority(state: _Partial) -> tuple[float, int, Mask]:
    """Sort key of partial partitions, best first."""
    return -(state.gain + _BOUND_WEIGHT * state.bound), -state.covered.bit_count(), state.covered


def beam_search(
    delta: DeltaEvaluator, candidates: Mapping[int, tuple[Mask, ...]], width: int = WIDTH
) -> list[Partition]:
    """The partitions that the search ends with, best first; at most ``width``.

    ``candidates`` maps each node to the patterns that it starts.
    """
    graph = delta.graph
    share = _best_shares(delta, candidates)
    states = [_Partial(0, 0.0, sum(share.values()), ContractedGraph(graph))]
    for index in range(len(graph)):
        patterns = [mask for mask in candidates.get(index, ()) if mask & (mask - 1)]
        if not patterns:
            continue
        successors = list(states)
        for state in states:
            if graph[index].kind in COMPUTE and state.covered >> index & 1:
                continue
            for mask in patterns:
                if not mask & state.covered and state.kernels.admits(mask):
                    successors.append(_extended(delta, state, mask, share))
        states = [_settled(state) for state in _best_states(delta, successors, width)]
    states.sort(key=lambda s: (-s.gain, s.covered))
    return [_partition(delta, state) for state in states]


def _best_states(delta: DeltaEvaluator, states: list[_Partial], width: int) -> list[_Partial]:
    """The best distinct states whose last pattern can be generated.

    Generation is slow to check, so only the states that would be kept are checked.
    """
    best: dict[tuple[Mask, float], _Partial] = {}
    for state in sorted(states, key=_priority):
        is_new = (state.covered, state.gain) not in best
        if is_new and (not state.pattern or delta.can_fuse(state.pattern)):
            best[state.covered, state.gain] = state
            if len(best) == width:
                break
    return list(best.values())


def _best_shares(
    delta: DeltaEvaluator, candidates: Mapping[int, tuple[Mask, ...]]
) -> dict[int, float]:
    """For each operator: the best gain per operator of the candidates that contain it."""
    share = dict.fromkeys(delta.graph.operators, 0.0)
    for masks in candidates.values():
        for mask in masks:
            per_operator = (delta.gain(mask) or 0.0) / mask.bit_count()
            for index in members(mask):
                share[index] = max(share[index], per_operator)
    return share


def _extended(
    delta: DeltaEvaluator, state: _Partial, mask: Mask, share: Mapping[int, float]
) -> _Partial:
    gain = state.gain + (delta.gain(mask) or 0.0)
    bound = state.bound - sum(share[index] for index in members(mask))
    return _Partial(state.covered | mask, gain, bound, state.kernels, mask, state)


def _settled(state: _Partial) -> _Partial:
    """The state with its last pattern added to a copy of ``kernels``.

    The copy is made only for states that stay in the beam.
    """
    if state.previous is None or state.kernels is not state.previous.kernels:
        return state
    kernels = state.kernels.copy()
    kernels.add(state.pattern)
    return _Partial(state.covered, state.gain, state.bound, kernels, state.pattern, state.previous)


def _partition(delta: DeltaEvaluator, state: _Partial) -> Partition:
    groups = [1 << i for i in delta.graph.operators if not state.covered >> i & 1]
    current: _Partial | None = state
    while current is not None:
        if current.pattern:
            groups.append(current.pattern)
        current = current.previous
    return Partition.from_groups(groups)


_STUCK, _THROWS = 30, 10
"""Parameters of annealing. They are low because small graphs have few partitions: the search ends
soon after it has seen them."""


@dataclass(frozen=True, slots=True)
class ExplorationResult:
    """A partition with the intermediate results that led to it."""

    partition: Partition
    """The partition to generate."""
    connected: Partition
    """The partition before packing: all kernels are connected."""
    from_beam: Partition
    """The partition before joining and packing, or the one that :func:`refine` started from."""


def explore(delta: DeltaEvaluator, *, top: int = TOP, width: int = WIDTH) -> ExplorationResult:
    """Run the explorer: it searches by the delta-evaluator and selects by the latency-evaluator.

    ``top`` patterns are kept for each vertex, ``width`` partitions in the beam search.
    """
    latency = LatencyEvaluator(delta)
    results = []
    for from_beam in beam_search(delta, candidate_patterns(delta, top), width):
        for score in (_gain_score(delta), _position_score(delta)):
            connected = join_kernels(delta, from_beam, score)
            packed = pack_kernels(delta, connected)
            results.append(ExplorationResult(packed, connected, from_beam))
    return min(results, key=lambda result: latency.cost(result.partition))


def refine(
    delta: DeltaEvaluator, partition: Partition, *, evaluations: int = 300, seed: int = 0
) -> ExplorationResult:
    """Anneal from a partition of connected kernels, then pack; not part of FusionStitching.

    By the delta-evaluator, the result's ``connected`` partition is never worse than ``partition``.
    The same seed gives the same result.
    """
    space = PartitionSpace(delta, partition)
    search = Anneal(perturb_after=_STUCK, max_perturbations=_THROWS)
    budget = Budget(evaluations=evaluations)
    best = search.run(space, DeltaObjective(delta), budget, seed=seed).best
    return ExplorationResult(pack_kernels(delta, best), best, partition)


def _gain_score(delta: DeltaEvaluator) -> Score:
    """Score of joining two kernels: the seconds gained by the delta-evaluator."""

    def score(first: Mask, second: Mask) -> float | None:
        joined = delta.gain(first | second)
        separate = (delta.gain(first) or 0.0) + (delta.gain(second) or 0.0)
        return None if joined is None else joined - separate

    return score


def _position_score(delta: DeltaEvaluator) -> Score:
    """Score of joining two kernels that gain: their last operator, so kernels grow to producers."""
    gain_score = _gain_score(delta)

    def score(first: Mask, second: Mask) -> float | None:
        gain = gain_score(first, second)
        return None if gain is None or gain <= 0 else float(max(first, second).bit_length())

    return score
