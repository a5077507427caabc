"""A plan out of candidate patterns: beam search of width 3 (arXiv:2009.10924).

Vertices are visited in topological order.  A vertex that no chosen pattern holds yet begins one of
its candidates, or stays alone.  Our reading: partial plans cover different operators, so they are
compared by their gain and what the rest could still gain at most, each operator taken at the best
gain per operator of all candidates that hold it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.explore.contraction import Contraction
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.partition import Mask, Plan, members

WIDTH = 3
_HOPE = 0.95
"""How much of what the rest could gain at most counts: less than all, so that a gain at hand goes
before an equal one hoped for."""


@dataclass(frozen=True, slots=True)
class _Partial:
    """Patterns chosen so far (``before`` holds the earlier ones), and what they are worth."""

    covered: Mask
    gain: float
    rest: float
    kernels: Contraction
    chosen: Mask = 0
    before: _Partial | None = None


def _promise(state: _Partial) -> tuple[float, int, Mask]:
    """Order of partial plans, best first."""
    return -(state.gain + _HOPE * state.rest), -state.covered.bit_count(), state.covered


def beam(delta: Delta, found: Mapping[int, tuple[Mask, ...]], width: int = WIDTH) -> list[Plan]:
    """The best plans that the beam ends with, best first; at most ``width``."""
    graph = delta.graph
    share = _shares(delta, found)
    states = [_Partial(0, 0.0, sum(share.values()), Contraction(graph))]
    for index in range(len(graph)):
        options = [mask for mask in found.get(index, ()) if mask & (mask - 1)]
        if not options:
            continue
        following = list(states)
        for state in states:
            if graph[index].kind in COMPUTE and state.covered >> index & 1:
                continue
            for mask in options:
                if not mask & state.covered and state.kernels.admits(mask):
                    following.append(_extended(delta, state, mask, share))
        states = [_settled(state) for state in _best(delta, following, width)]
    states.sort(key=lambda s: (-s.gain, s.covered))
    return [_plan(delta, state) for state in states]


def _best(delta: Delta, states: list[_Partial], width: int) -> list[_Partial]:
    """The best different ones that can be generated, which is asked of as few as possible."""
    found: dict[tuple[Mask, float], _Partial] = {}
    for state in sorted(states, key=_promise):
        new = (state.covered, state.gain) not in found
        if new and (not state.chosen or delta.joins(state.chosen)):
            found[state.covered, state.gain] = state
            if len(found) == width:
                break
    return list(found.values())


def _shares(delta: Delta, found: Mapping[int, tuple[Mask, ...]]) -> dict[int, float]:
    """Of every operator the best gain per operator of the candidates that hold it."""
    share = dict.fromkeys(delta.graph.operators, 0.0)
    for masks in found.values():
        for mask in masks:
            each = (delta.gain(mask) or 0.0) / mask.bit_count()
            for index in members(mask):
                share[index] = max(share[index], each)
    return share


def _extended(delta: Delta, state: _Partial, mask: Mask, share: Mapping[int, float]) -> _Partial:
    gain = state.gain + (delta.gain(mask) or 0.0)
    rest = state.rest - sum(share[index] for index in members(mask))
    return _Partial(state.covered | mask, gain, rest, state.kernels, mask, state)


def _settled(state: _Partial) -> _Partial:
    """The same with its last pattern among its kernels; only states that survive pay for that."""
    if state.before is None or state.kernels is not state.before.kernels:
        return state
    kernels = state.kernels.copy()
    kernels.add(state.chosen)
    return _Partial(state.covered, state.gain, state.rest, kernels, state.chosen, state.before)


def _plan(delta: Delta, state: _Partial) -> Plan:
    groups = [1 << i for i in delta.graph.operators if not state.covered >> i & 1]
    last: _Partial | None = state
    while last is not None:
        if last.chosen:
            groups.append(last.chosen)
        last = last.before
    return Plan.of(groups)
