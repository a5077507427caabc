"""Which optimiser step ends a step of the program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.attach.program.periods import Borders


def borders_of(steps: Sequence[int]) -> list[int]:
    """Positions of the optimiser steps that end a step."""
    borders = Borders()
    return [at for at, optimizer in enumerate(steps) if borders.note(optimizer)]


def settled(steps: Sequence[int], period: int) -> list[int]:
    """Differences of the borders in the second half."""
    found = [at for at in borders_of(steps) if at > len(steps) // 2]
    assert len(found) >= 2
    return sorted({b - a for a, b in pairwise(found)})


def test_each_step_of_one_optimiser_is_a_border() -> None:
    assert borders_of([7] * 5) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "period",
    [
        [1, 2],  # a GAN
        [1, 1, 1, 1, 1, 2],  # a critic five times, then the generator
        [2, 1, 1, 1, 1, 1],  # the other way round
        [1, 2, 3],
        list(range(300)),  # one optimiser a parameter, stepped in the backward pass
    ],
)
def test_several_optimisers_step_in_periods(period: list[int]) -> None:
    assert settled(period * 40, len(period)) == [len(period)]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True), st.integers(1, 6))
def test_any_period_is_found(order: list[int], repeats: int) -> None:
    period = [*([order[0]] * repeats), *order[1:]]
    closed = settled(period * 60, len(period))
    assert closed == ([1] if len(order) == 1 else [len(period)])


def test_an_optimiser_that_stops_is_left_behind() -> None:
    steps = [1] * 4 + [2] * 200
    assert borders_of(steps)[-20:] == list(range(184, 204))
    steps = [1, 2] * 10 + [1] * 200  # the second one has ended its work
    assert borders_of(steps)[-20:] == list(range(200, 220))


def test_the_period_is_told() -> None:
    borders = Borders()
    for optimizer in [1, 1, 1, 2] * 20:
        borders.note(optimizer)
    assert sorted(borders.period) == [1, 3]
