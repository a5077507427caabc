"""Where episodes begin."""

from __future__ import annotations

from nostall.sass.schedule import Schedule

Opening = tuple[Schedule, float]
"""A state to begin an episode with, and its speed (1: the original's)."""

POOL = 8
AFRESH = 4


class Openings:
    """Every fourth episode begins with the original, the others in turn with the ``POOL`` best
    states that were met so far; ``best`` has them, the fastest first."""

    def __init__(self) -> None:
        self.best: list[Opening] = []
        self.episodes = 0

    def met(self, state: Schedule, speed: float) -> None:
        """Remember a state that is one of the best, and no slower than the original."""
        if speed >= 1 and (len(self.best) < POOL or speed > self.best[-1][1]):
            others = [opening for opening in self.best if opening[0] != state]
            self.best = sorted([*others, (state, speed)], key=lambda opening: -opening[1])[:POOL]

    def __call__(self) -> Opening | None:
        """What the next episode begins with; None: the original."""
        self.episodes += 1
        if self.episodes % AFRESH == 0 or not self.best:
            return None
        return self.best[self.episodes * (AFRESH - 1) // AFRESH % len(self.best)]
