"""Proposals made in advance, while a device is busy with the one before.

What a step proposes follows from the state that it starts from and from the random generator.  Both
are known for either end of the step before, so the proposals of both can be drawn early; the step
then takes the one that fits.  Nothing changes but the time at which work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from nostall.core import Space
from nostall.core.space import M, S

Draw = Callable[[Space[S, M], S, np.random.Generator], "M | None"]


@dataclass(frozen=True, slots=True)
class _Early(Generic[S, M]):
    state: S
    before: Mapping[str, Any]
    move: M
    candidate: S
    after: Mapping[str, Any]


class Ahead(Generic[S, M]):
    """Draws proposals of ``space`` with ``draw``, early where that was asked for."""

    def __init__(self, space: Space[S, M], draw: Draw[S, M]) -> None:
        self.space, self.draw = space, draw
        self._rng = np.random.default_rng(0)
        self._early: list[_Early[S, M]] = []

    def propose(self, state: S, rng: np.random.Generator) -> tuple[M, S] | None:
        """A move and where it leads, or None where no move is legal."""
        early, self._early = self._early, []
        now = rng.bit_generator.state if early else {}
        for known in early:
            if known.state is state and known.before == now:
                rng.bit_generator.state = known.after
                return known.move, known.candidate
        move = self.draw(self.space, state, rng)
        return None if move is None else (move, self.space.apply(state, move))

    def look(self, states: Iterable[S], rng: np.random.Generator) -> Iterator[S]:
        """Draw what :meth:`propose` will draw from each of ``states`` when ``rng`` stands where it
        does now; gives the candidates, one at a time."""
        before = rng.bit_generator.state
        for state in states:
            self._rng.bit_generator.state = before
            move = self.draw(self.space, state, self._rng)
            if move is not None:
                candidate = self.space.apply(state, move)
                after = self._rng.bit_generator.state
                self._early.append(_Early(state, before, move, candidate, after))
                yield candidate
