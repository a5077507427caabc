"""Bandit that chooses operators: Thompson sampling with discounted rewards.

Each operator has a Beta distribution of its reward (0 to 1).  A choice draws one value from each
distribution and takes the operator with the largest.  Rewards fade with the number of later
observations, because an operator that helps early may not help later (Raj and Kalyani, "Taming
non-stationary bandits", arXiv:1707.09727).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DISCOUNT = 0.99
"""Factor by which an older observation of the same operator counts less."""
_PRIOR_SUCCESS, _PRIOR_FAILURE = 0.5, 1.5
"""Observations that each operator starts with."""


@dataclass(frozen=True, slots=True)
class Bandit:
    """Rewards of operators; immutable."""

    successes: tuple[float, ...]
    failures: tuple[float, ...]
    """Discounted sums of rewards, and of 1 - reward, by operator."""

    @classmethod
    def of(cls, count: int) -> Bandit:
        """A bandit for ``count`` operators without observations."""
        return cls((0.0,) * count, (0.0,) * count)

    def choose(self, rng: np.random.Generator) -> int:
        """The number of an operator."""
        draws = rng.beta(
            np.asarray(self.successes) + _PRIOR_SUCCESS, np.asarray(self.failures) + _PRIOR_FAILURE
        )
        return int(np.argmax(draws))

    def reward(self, number: int, value: float, weight: float = 1.0) -> Bandit:
        """The bandit after an operator got the reward ``value``, which counts ``weight`` times."""
        value = min(1.0, max(0.0, value))
        successes, failures = list(self.successes), list(self.failures)
        successes[number] = DISCOUNT * successes[number] + weight * value
        failures[number] = DISCOUNT * failures[number] + weight * (1.0 - value)
        return Bandit(tuple(successes), tuple(failures))

    def dump(self) -> dict[str, float]:
        """The rewards as numbers of a checkpoint."""
        pairs = zip(self.successes, self.failures, strict=True)
        return {
            key: value
            for n, (success, failure) in enumerate(pairs)
            for key, value in ((f"success{n:03}", success), (f"failure{n:03}", failure))
        }

    @classmethod
    def load(cls, memory: dict[str, float], count: int) -> Bandit:
        """A bandit from the numbers of :meth:`dump`; operators without numbers start anew."""
        return cls(
            tuple(memory.get(f"success{n:03}", 0.0) for n in range(count)),
            tuple(memory.get(f"failure{n:03}", 0.0) for n in range(count)),
        )
