"""Values of a space's portfolio in a search, and the pairs of states that help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from nostall.core import Space
from nostall.core.space import M, S
from nostall.search.evolution.operators import PortfolioSpace

MISSING_VALUE = 1e300
"""Value of a state that was dropped or failed; a checkpoint is JSON, which has no infinity."""
_HELPS = 0.998
"""Part of the start's value below which a state helps."""
_PAIRED = 6
"""States whose pairs are tried."""


def value_key(number: int) -> str:
    """Key of a checkpoint's memory for state ``number`` of the portfolio and its pairs."""
    return f"given{number:04}"


def portfolio_pairs(
    space: Space[S, M], memory: Mapping[str, float], start_value: float
) -> tuple[S, ...]:
    """Pairs of the states of the portfolio that help most; empty before all have a value."""
    if not isinstance(space, PortfolioSpace):
        return ()
    singles = space.portfolio()
    values = [(memory.get(value_key(n)), n) for n in range(len(singles))]
    known = sorted((value, n) for value, n in values if value is not None)
    if len(known) < len(singles):
        return ()
    helpful = [singles[n] for value, n in known[:_PAIRED] if value < _HELPS * start_value]
    pairs = (space.combine(a, b) for a, b in combinations(helpful, 2))
    return tuple(pair for pair in pairs if pair is not None)


def portfolio_values(
    space: Space[S, M], memory: Mapping[str, float], start_value: float
) -> Iterator[tuple[S, float]]:
    """The states of the portfolio and their pairs, with the values that the search found."""
    if not isinstance(space, PortfolioSpace):
        return
    states = (*space.portfolio(), *portfolio_pairs(space, memory, start_value))
    for number, state in enumerate(states):
        if value_key(number) in memory:
            yield state, memory[value_key(number)]
