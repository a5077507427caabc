"""Budgets of searches: what spends them, and what compilation leaves of a limit on planning."""

from __future__ import annotations

from time import monotonic, sleep

import pytest

from nostall.core import search
from nostall.core.compile_clock import compiled_s, planning_clock
from nostall.core.errors import BadInput
from nostall.core.search import Budget


def test_either_limit_ends_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [100.0]
    monkeypatch.setattr(search, "monotonic", lambda: times[-1])
    both, timed, counted = Budget(5.0, 3).clock(), Budget(5.0).clock(), Budget(None, 3).clock()
    spent = []
    for now, evaluations in ((100.0, 0), (104.9, 2), (104.9, 3), (105.0, 2), (106.0, 10**9)):
        times.append(now)
        spent.append(tuple(clock.spent(evaluations) for clock in (both, timed, counted)))
    assert spent == [
        (False, False, False),
        (False, False, False),
        (True, False, True),
        (True, True, False),
        (True, True, True),
    ]
    assert both.elapsed == 6.0


@pytest.mark.parametrize("limits", [(None, None), (0.0, 5), (1.0, 0), (-1.0, None)])
def test_a_budget_has_limits_above_zero(limits: tuple[float | None, int | None]) -> None:
    with pytest.raises(BadInput, match="give at least one of them, greater than 0"):
        Budget(*limits)


def test_compilation_does_not_count_as_planning() -> None:
    numba = pytest.importorskip("numba")
    compiled_s()  # starts to listen

    def total(values):  # type: ignore[no-untyped-def]
        found = 0.0
        for value in values:
            found += value * value
        return found

    wall, planned, compiled = monotonic(), planning_clock(), compiled_s()
    numba.njit(total)((1.0, 2.0))
    spent_s, left_s, compiling_s = (
        monotonic() - wall, planning_clock() - planned, compiled_s() - compiled
    )  # fmt: skip
    assert 0 < compiling_s <= spent_s
    assert left_s == pytest.approx(spent_s - compiling_s, abs=0.05)
    before = planning_clock()
    sleep(0.02)
    assert planning_clock() - before >= 0.02
