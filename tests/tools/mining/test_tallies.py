"""Counts of sightings: when a distance counts as evidence."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tools.mining.tallies import Key, Tallies, Tally, least

PAIR: Key = ("RAW", "FADD>R|FMUL.1", "FADD>R|fma:data", "fma>R|fma:data", 4)


def test_a_distance_needs_three_occurrences_in_two_functions() -> None:
    assert least([(4, Tally(2, 2, b"a"))]) is None
    assert least([(4, Tally(9, 1, b"a"))]) is None
    row = least([(4, Tally(3, 2, b"a"))])
    assert row is not None and row.distance == 4


def test_a_rare_smaller_distance_counts_only_with_larger_ones() -> None:
    row = least([(2, Tally(1, 1, b"a")), (4, Tally(50, 9, b"b")), (6, Tally(7, 3, b"c"))])
    assert row is not None
    assert (row.distance, row.seen, row.functions) == (4, 58, 9)


def test_the_order_of_functions_does_not_matter() -> None:
    first, second = Tallies(), Tallies()
    first.add_function(b"1111", 10, {PAIR: 2})
    second.add_function(b"2222", 20, {PAIR: 1})
    one, other = Tallies(), Tallies()
    for part in (first, second):
        one.add(part)
    for part in (second, first):
        other.add(part)
    assert one.instructions == other.instructions == 30
    assert least([(4, one.tallies[PAIR])]) == least([(4, other.tallies[PAIR])])


@given(st.dictionaries(st.integers(1, 24), st.integers(1, 40), min_size=1))
def test_more_occurrences_never_raise_the_least_distance(seen: dict[int, int]) -> None:
    tallies = [(distance, Tally(count, 2, b"x")) for distance, count in seen.items()]
    before = least(tallies)
    after = least([*tallies, (min(seen), Tally(3, 2, b"y"))])
    assert after is not None
    assert before is None or after.distance <= before.distance
