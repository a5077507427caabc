"""Beam search of width 3 for a partition made of candidate patterns (arXiv:2009.10924).

The search visits nodes in topological order. If no selected pattern contains a node yet, the node
starts one of its candidate patterns or stays single. Our reading: partial partitions cover
different operators, so the search compares their gains plus an upper bound on what the uncovered
operators can still gain. The bound takes, for each operator, the best gain per operator of all
candidates that contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore.contraction import ContractedGraph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.partition import Mask, Partition, members

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
