"""Counts of later setters of each scoreboard, packed into one number, where two paths meet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nostall.sass.safety.hazards.in_flight import _minimum_counts, _unit_counts

COUNTS = st.lists(st.integers(0, 255), min_size=6, max_size=6)


def _packed(counts: list[int]) -> int:
    return sum(count << 8 * n for n, count in enumerate(counts))


@given(COUNTS, COUNTS)
def test_the_smaller_count_of_each_scoreboard_holds(first: list[int], second: list[int]) -> None:
    smaller = [min(pair) for pair in zip(first, second, strict=True)]
    assert _minimum_counts(_packed(first), _packed(second)) == _packed(smaller)


@given(st.sets(st.integers(0, 5)))
def test_each_scoreboard_that_is_set_counts_once(scoreboards: set[int]) -> None:
    mask = sum(1 << n for n in scoreboards)
    assert _unit_counts(mask) == _packed([int(n in scoreboards) for n in range(6)])
