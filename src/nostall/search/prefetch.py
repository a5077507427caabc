"""Prefetching of proposals: the next candidates are drawn while a device evaluates the current one.

A proposal depends on the state that a step starts from and on the random generator. Both are known
in advance for either outcome of the step before, accepted or rejected. So the proposals for both
can be drawn early, and the next step takes the one that fits. The search is the same with and
without prefetching, only the time of the work differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np

from nostall.core import Space
from nostall.core.space import M, S

Draw = Callable[[Space[S, M], S, np.random.Generator], "M | None"]
"""Draws a legal move from a state; None if there is none."""


@dataclass(frozen=True, slots=True)
class _Prefetched(Generic[S, M]):
    """A proposal from ``state``, with the generator's state before and after the draw."""

    state: S
    rng_before: Mapping[str, Any]
    move: M
    candidate: S
    rng_after: Mapping[str, Any]


class ProposalPrefetcher(Generic[S, M]):
    """Draws proposals of ``space`` with ``draw``, in advance if :meth:`prefetch` is called."""

    def __init__(self, space: Space[S, M], draw: Draw[S, M]) -> None:
        self.space, self.draw = space, draw
        self._rng = np.random.default_rng(0)
        self._prefetched: list[_Prefetched[S, M]] = []

    def propose(self, state: S, rng: np.random.Generator) -> tuple[M, S] | None:
        """A legal move and the state it leads to; None if no move is legal."""
        prefetched, self._prefetched = self._prefetched, []
        rng_now = rng.bit_generator.state if prefetched else {}
        for proposal in prefetched:
            if proposal.state is state and proposal.rng_before == rng_now:
                rng.bit_generator.state = proposal.rng_after
                return proposal.move, proposal.candidate
        move = self.draw(self.space, state, rng)
        return None if move is None else (move, self.space.apply(state, move))

    def prefetch(self, states: Iterable[S], rng: np.random.Generator) -> Iterator[S]:
        """Draw what :meth:`propose` will draw from each of ``states`` with ``rng`` as it is now.

        Yields the candidates one at a time and leaves ``rng`` unchanged.
        """
        before = rng.bit_generator.state
        for state in states:
            self._rng.bit_generator.state = before
            move = self.draw(self.space, state, self._rng)
            if move is not None:
                candidate = self.space.apply(state, move)
                after = self._rng.bit_generator.state
                self._prefetched.append(_Prefetched(state, before, move, candidate, after))
                yield candidate
