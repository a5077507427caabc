"""Periods of the outermost calls of modules."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.attach.program.periods import Call, CallBorders, Period, find_period

TEXT, UNET, VAE = 1, 2, 3


def calls(*units: int) -> list[Call]:
    return [Call(unit, (unit, "shape"), 100) for unit in units]


def image(steps: int = 10) -> list[Call]:
    return calls(TEXT, *[UNET] * steps, VAE)


def borders_of(given: Sequence[Call], awaited: frozenset[int] = frozenset()) -> list[int]:
    """Positions of the calls that end a step; -1 for those that were not to come."""
    borders, found = CallBorders(), []
    for at, call in enumerate(given):
        if borders.period is None:
            borders.note(call)
            if borders.is_due():
                borders.look(lambda period: awaited <= set(period.units))
        elif (ends := borders.ends(call.unit)) is None:
            found.append(-1)
        elif ends:
            found.append(at)
    return found


def test_each_call_of_one_module_is_a_step() -> None:
    assert find_period(calls(*[UNET] * 5)) is None  # too few
    assert find_period(calls(*[UNET] * 6)) == Period(0, (UNET,), False)
    assert borders_of(calls(*[UNET] * 10)) == [6, 7, 8, 9]


def test_a_pipeline_repeats_as_a_whole() -> None:
    found = borders_of(image() * 8, frozenset({TEXT, UNET, VAE}))
    assert found[:2] == [4 * 12 - 1, 5 * 12 - 1] and -1 not in found


def test_calls_before_the_first_step_belong_to_none() -> None:
    warm_up = [Call(UNET, "other shape", 1)] * 3
    assert find_period([*warm_up, *image() * 3]) == Period(
        3, tuple(call.unit for call in image()), False
    )
    assert find_period([*calls(TEXT), *calls(*[UNET] * 9)]) == Period(1, (UNET,), False)


def test_the_part_of_a_pipeline_is_no_period_while_a_module_waits() -> None:
    borders = CallBorders()
    for call in image(40)[:30]:
        borders.note(call)
    assert not borders.look(lambda period: {TEXT, UNET, VAE} <= set(period.units))
    assert borders.look(lambda period: {UNET} <= set(period.units))


def test_batches_of_different_lengths_are_steps_of_different_work() -> None:
    lengths = [64, 32, 48, 64, 96, 32, 80, 16, 64, 48, 96] * 4
    varied = [Call(UNET, length, length) for length in lengths[:32]]
    varied[5] = Call(UNET, 7, 7)  # so that the lengths have no period
    varied[17] = Call(UNET, 9, 9)
    varied[29] = Call(UNET, 11, 11)
    assert find_period(varied[:31]) is None
    assert find_period(varied) == Period(0, (UNET,), True)


def test_a_sequence_that_grows_is_no_step_a_call() -> None:
    tokens = [Call(UNET, length, length) for length in range(8, 48)]
    assert find_period(tokens) is None
    assert find_period(tokens * 3) == Period(0, (UNET,) * 40, False)


def test_another_order_of_calls_is_told() -> None:
    assert borders_of([*calls(*[TEXT, VAE] * 6), *calls(VAE, VAE)])[-2:] == [-1, -1]


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=9),
    st.integers(0, 3),
)
def test_any_period_is_found_and_not_more_than_it(
    period: list[tuple[int, int]], before: int
) -> None:
    repeated = [Call(unit, work, work) for unit, work in period]
    given_calls = [*[Call(9, 9, 9)] * before, *repeated * 8]
    found = find_period(given_calls)
    assert found is not None and len(period) % len(found.units) == 0
    assert found.start <= before + len(period) and not found.is_varied


@pytest.mark.parametrize("seed", range(3))
def test_no_period_is_found_in_random_orders(seed: int) -> None:
    import random

    draw = random.Random(seed)
    assert find_period(calls(*[draw.choice((TEXT, UNET, VAE)) for _ in range(400)])) is None
