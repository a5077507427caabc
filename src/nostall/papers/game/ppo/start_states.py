"""Start states of episodes: the original, or one of the best states so far."""

from __future__ import annotations

from nostall.sass.schedule import Schedule

StartState = tuple[Schedule, float]
"""A state with which an episode begins, and its speedup (1: as fast as the original)."""

POOL_SIZE = 8
ORIGINAL_INTERVAL = 4
"""Each episode with a number divisible by this begins with the original."""


class StartStatePool:
    """The ``POOL_SIZE`` best states so far, with which three of four episodes begin in turn."""

    def __init__(self) -> None:
        self.best: list[StartState] = []
        """The fastest first."""
        self.episodes = 0

    def add(self, state: Schedule, speedup: float) -> None:
        """Add a state if it is one of the best and no slower than the original."""
        if speedup >= 1 and (len(self.best) < POOL_SIZE or speedup > self.best[-1][1]):
            others = [start for start in self.best if start[0] != state]
            self.best = sorted([*others, (state, speedup)], key=lambda start: -start[1])[:POOL_SIZE]

    def next_start(self) -> StartState | None:
        """The start state of the next episode; None for the original."""
        self.episodes += 1
        if self.episodes % ORIGINAL_INTERVAL == 0 or not self.best:
            return None
        turn = self.episodes * (ORIGINAL_INTERVAL - 1) // ORIGINAL_INTERVAL
        return self.best[turn % len(self.best)]
