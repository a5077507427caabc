"""Plans as a search space: merge, split, move one operator.  Patterns stay connected and legal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nostall.core import BadInput, IllegalMove, Space, Tags
from nostall.core.space import NO_TAGS
from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.explore.contraction import Contraction
from nostall.fusion.explore.neighbours import neighbours
from nostall.fusion.graph.partition import Mask, Plan, members


@dataclass(frozen=True, slots=True)
class Move:
    """One change.  ``merge``: the kernels of operators a and b become one.  ``move``: operator a
    joins the kernel of b.  ``alone``: a leaves its kernel.  ``split``: a leaves its kernel together
    with all that depends on it there."""

    kind: str
    a: int
    b: int = -1

    @property
    def tags(self) -> Tags:
        """The kind alone."""
        return frozenset({self.kind})

    def __str__(self) -> str:
        return f"{self.kind} {self.a}" + (f" {self.b}" if self.b >= 0 else "")


class PlanSpace(Space[Plan, Move]):
    """All plans of connected legal patterns that can be reached from ``first``.

    A change that several pairs of neighbours stand for belongs to the first of them.
    """

    def __init__(self, delta: Delta, first: Plan) -> None:
        first.check(delta.graph)
        self.delta = delta
        self.first = first
        self.beside = neighbours(delta.graph)
        operators = delta.graph.operators
        pairs = [(a, b) for a in operators for b in members(self.beside[a])]
        self._all = [
            *(Move("merge", a, b) for a, b in pairs if a < b),
            *(Move("move", a, b) for a, b in pairs),
            *(Move(kind, a) for kind in ("alone", "split") for a in operators),
        ]

    def start(self) -> Plan:
        return self.first

    def draw(self, state: Plan, rng: np.random.Generator, wanted: Tags = NO_TAGS) -> Move | None:
        fitting = self._all if not wanted else [m for m in self._all if wanted <= m.tags]
        if not fitting:
            return None
        move = fitting[int(rng.integers(len(fitting)))]
        return move if self._after(state, move) is not None else None

    def moves(self, state: Plan) -> Iterator[Move]:
        for move in self._all:
            if self._after(state, move) is not None:
                yield move

    def apply(self, state: Plan, move: Move) -> Plan:
        after = self._after(state, move)
        if after is None:
            raise IllegalMove(
                f"{move} does not apply to this plan of {len(state)} kernels; allowed is what "
                "PlanSpace.moves offers"
            )
        return after

    def key(self, state: Plan) -> bytes:
        return self.dump(state).encode()

    def dump(self, state: Plan) -> str:
        return " ".join(format(mask, "x") for mask in state.groups)

    def load(self, text: str) -> Plan:
        try:
            plan = Plan.of(int(word, 16) for word in text.split())
        except ValueError:
            raise BadInput(
                f"{text[:60]!r} is no plan; allowed are hexadecimal masks with spaces between; "
                "load what dump() gave"
            ) from None
        plan.check(self.delta.graph)
        return plan

    def _after(self, state: Plan, move: Move) -> Plan | None:
        """The plan after a move; None where that is illegal."""
        if move.a not in self.beside:
            return None
        held = _holder(state, move.a)
        own = 1 << move.a
        if move.kind == "alone":
            if held.bit_count() < 3 and move.a != held.bit_length() - 1:
                return None  # of two operators the last leaves
            return self._replaced(state, (held,), (own, held ^ own))
        if move.kind == "split":
            part = held & (self.delta.graph.descendants[move.a] | own)
            if min(part.bit_count(), (held ^ part).bit_count()) < 2:
                return None
            return self._replaced(state, (held,), (part, held ^ part))
        if move.b not in self.beside:
            return None
        other = _holder(state, move.b)
        if held == other:
            return None
        if move.kind == "merge":
            if (move.a, move.b) != self._first_pair(held, other):
                return None
            return self._replaced(state, (held, other), (held | other,))
        nearest = self.beside[move.a] & other
        if held == own or nearest & -nearest != 1 << move.b:
            return None
        return self._replaced(state, (held, other), (held ^ own, other | own))

    def _first_pair(self, one: Mask, other: Mask) -> tuple[int, int]:
        """The first pair of neighbours (a < b) between two kernels."""
        for a in members(one | other):
            far = other if one >> a & 1 else one
            beyond = self.beside[a] & far & ~((1 << a) - 1)
            if beyond:
                return a, (beyond & -beyond).bit_length() - 1
        return -1, -1

    def _replaced(self, state: Plan, old: tuple[Mask, ...], new: tuple[Mask, ...]) -> Plan | None:
        """The plan with other kernels in place of ``old``; None where one is not legal."""
        if any(not mask for mask in new):
            return None
        for mask in new:
            if not self.delta.is_connected(mask) or not self.delta.joins(mask):
                return None
        kept = [mask for mask in state.groups if mask not in old]
        kernels = Contraction(self.delta.graph)
        for mask in kept:
            kernels.add(mask)
        for mask in new:
            if not kernels.admits(mask):
                return None
            kernels.add(mask)
        return Plan.of([*kept, *new])


def _holder(state: Plan, index: int) -> Mask:
    return next(mask for mask in state.groups if mask >> index & 1)
