"""Search space of strategies on one mesh dimension: linked moves along the edges of the graph.

A move gives one class another strategy and follows the edges that then need a redistribution: the
class at the other end takes a strategy that needs none.  Each edge stops the move with a
probability that depends on its reach, so that moves of any size are drawn; reach 0 changes one
class.  Edges without a possible redistribution never stop a move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numba import njit

from nostall.core import IllegalMove, Measurement, Objective, Space, Tags
from nostall.core.measurement import Kind
from nostall.core.space import NO_TAGS
from nostall.parallel.sharding.planners.tables import Bits, Floats, Integers, Tables

State = bytes
"""The number of the strategy of each class, one byte each."""
REACHES = 16
"""Reaches of moves; those above 0 stop at an edge with a probability of 2 % to 32 %."""
MAX_STRATEGIES = 256
"""Strategies of a class that a byte can number."""


@dataclass(frozen=True, slots=True)
class Move:
    """Give class ``anchor`` the strategy ``strategy``; ``reach`` decides how far it spreads."""

    anchor: int
    strategy: int
    reach: int

    @property
    def tags(self) -> Tags:
        """``single`` or ``linked``."""
        return frozenset(("linked" if self.reach else "single",))


class StrategySpace(Space[State, Move]):
    """Strategies of the classes of one problem."""

    def __init__(self, tables: Tables, start: Sequence[int]) -> None:
        self.tables, self._start = tables, bytes(start)
        self._movable = np.flatnonzero(tables.strategies > 1)

    def start(self) -> State:
        return self._start

    def draw(
        self, state: State, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> Move | None:
        if not len(self._movable):
            return None
        anchor = int(self._movable[rng.integers(len(self._movable))])
        count = int(self.tables.strategies[anchor])
        other = int(rng.integers(count - 1))
        move = Move(anchor, other + (other >= state[anchor]), int(rng.integers(REACHES)))
        is_legal = required_tags <= move.tags and self._moved(state, move) is not None
        return move if is_legal else None

    def moves(self, state: State) -> Iterator[Move]:
        for anchor in map(int, self._movable):
            for strategy in range(int(self.tables.strategies[anchor])):
                for reach in range(REACHES):
                    move = Move(anchor, strategy, reach)
                    if strategy != state[anchor] and self._moved(state, move) is not None:
                        yield move

    def apply(self, state: State, move: Move) -> State:
        moved = self._moved(state, move)
        if moved is None:
            raise IllegalMove(f"{move} leads to a redistribution that is not possible")
        return moved

    def key(self, state: State) -> bytes:
        return state

    def dump(self, state: State) -> str:
        return state.hex()

    def load(self, text: str) -> State:
        return bytes.fromhex(text)

    def _moved(self, state: State, move: Move) -> State | None:
        """The state after a move; None if it is not possible."""
        t = self.tables
        numbers = np.frombuffer(state, dtype=np.uint8).astype(np.int64)
        _spread(
            numbers, move.anchor, move.strategy, move.reach, t.strategies, t.first_strategy,
            t.class_s, t.producer, t.consumer, t.first_pair, t.pair_s, t.is_equal, t.first_edge,
            t.edges_of,
        )  # fmt: skip
        if not np.isfinite(t.seconds(numbers)):
            return None
        return numbers.astype(np.uint8).tobytes()


class ModelledStep(Objective[State]):
    """Modelled seconds of a step."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def evaluate(self, states: Sequence[State]) -> list[Measurement]:
        return [self._measure(state) for state in states]

    def _measure(self, state: State) -> Measurement:
        numbers = np.frombuffer(state, dtype=np.uint8).astype(np.int64)
        seconds = self.tables.seconds(numbers)
        if not np.isfinite(seconds):
            return Measurement(self.unit, (), self.kind, failure="an impossible redistribution")
        return Measurement(self.unit, (seconds,), self.kind)


@njit(cache=True)
def _stops(reach: int, edge: int) -> bool:
    """Whether an edge stops a move, from a hash of both (the finalizer of MurmurHash3)."""
    if reach == 0:
        return True
    h = np.uint32(reach * 0x9E3779B1 + edge * 0x85EBCA6B)
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    h = h ^ (h >> np.uint32(16))
    return float(h) / 4294967296.0 < 0.02 * 16.0 ** ((reach - 1) / 14.0)


@njit(cache=True)
def _spread(
    state: Integers,
    anchor: int,
    strategy: int,
    reach: int,
    strategies: Integers,
    first_strategy: Integers,
    class_s: Floats,
    producer: Integers,
    consumer: Integers,
    first_pair: Integers,
    pair_s: Floats,
    is_equal: Bits,
    first_edge: Integers,
    edges_of: Integers,
) -> None:
    """Apply a move to ``state`` in place."""
    count = len(strategies)
    is_decided = np.zeros(count, dtype=np.bool_)
    queue = np.empty(count, dtype=np.int64)
    state[anchor], is_decided[anchor], queue[0] = strategy, True, anchor
    begin, end = 0, 1
    while begin < end:
        current = queue[begin]
        begin += 1
        for place in range(first_edge[current], first_edge[current + 1]):
            edge = edges_of[place]
            a, b = producer[edge], consumer[edge]
            other = b if a == current else a
            pair = first_pair[edge] + state[a] * strategies[b] + state[b]
            is_possible = np.isfinite(pair_s[pair])
            if is_decided[other] or is_equal[pair] or (is_possible and _stops(reach, edge)):
                continue
            best, best_s = -1, np.inf
            for number in range(strategies[other]):
                mine, theirs = (number, state[b]) if other == a else (state[a], number)
                pair = first_pair[edge] + mine * strategies[b] + theirs
                if not is_equal[pair] and (is_possible or not np.isfinite(pair_s[pair])):
                    continue
                seconds = class_s[first_strategy[other] + number]
                for near in range(first_edge[other], first_edge[other + 1]):
                    own = edges_of[near]
                    p, c = producer[own], consumer[own]
                    x = number if p == other else state[p]
                    y = number if c == other else state[c]
                    cost = pair_s[first_pair[own] + x * strategies[c] + y]
                    seconds += cost if np.isfinite(cost) else 1.0
                if seconds < best_s:
                    best, best_s = number, seconds
            if best >= 0:
                state[other], is_decided[other] = best, True
                queue[end] = other
                end += 1
