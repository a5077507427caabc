"""What tells schedules apart, each change taken back, and which of them matter."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from tests.unit.sass.game.kernels import transpose

from nostall.core import Measurement, Objective
from nostall.core.measurement import Kind
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.changes import changes, without
from nostall.sass.schedule.moves import Restall, Slide
from nostall.tuning.ablation import ablate


def test_no_change_no_words() -> None:
    assert changes(transpose(), transpose().start()) == []


def test_one_slide_is_told_and_taken_back() -> None:
    space = transpose()
    far = max(
        (m for m in space.moves(space.start()) if isinstance(m, Slide) and m.by < 0),
        key=lambda m: -m.by,
    )
    state = space.apply(space.start(), far)
    slid = [c for c in changes(space, state) if isinstance(c.back, Slide)]
    assert [c.index for c in slid] == [far.index]
    name = space.function.instructions[far.index].base
    assert slid[0].text.startswith(f"{name} #{far.index} hoisted above ")
    assert f"in block {space.graph.block_of[far.index]}" in slid[0].text
    back = without(space, state, slid[0])
    assert back is not None and np.array_equal(back.order, space.start().order)


def test_a_stall_is_told_and_taken_back() -> None:
    space = transpose()
    move = next(m for m in space.moves(space.start()) if isinstance(m, Restall))
    state = space.apply(space.start(), move)
    (change,) = changes(space, state)
    before = space.start().stall[move.index]
    assert f"stall {move.stall} instead of {before}" in change.text
    assert without(space, state, change) == space.start()


@pytest.mark.parametrize("seed", range(4))
def test_taking_changes_back_one_after_the_other_leads_home(seed: int) -> None:
    """Until nothing can be taken back alone; places and stalls only ever get closer."""
    space, rng = transpose(), np.random.default_rng(seed)
    state = space.start()
    for _ in range(6):
        move = space.propose(state, rng)
        assert move is not None
        state = space.apply(state, move)
    for _ in range(60):
        left = changes(space, state)
        options = [s for c in left if (s := without(space, state, c)) is not None]
        if not options:
            break
        state = options[-1]
    assert len(changes(space, state)) <= 2


class Wanted(Objective[Schedule]):
    """One instruction in front of another is worth 10 %, everything else nothing."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, first: int, second: int) -> None:
        self.first, self.second = first, second

    def evaluate(self, states):
        return [Measurement("s", (self._seconds(state),), self.kind) for state in states]

    def _seconds(self, state: Schedule) -> float:
        order = state.order.tolist()
        return 0.9 if order.index(self.second) < order.index(self.first) else 1.0


def test_only_the_change_that_matters_is_left() -> None:
    space, rng = transpose(), np.random.default_rng(3)
    move = next(m for m in space.moves(space.start()) if isinstance(m, Slide) and m.by == -3)
    over = move.index - 1
    state = space.apply(space.start(), move)
    for _ in range(25):
        step = space.propose(state, rng)
        assert step is not None
        after = space.apply(state, step)
        if Wanted(over, move.index)._seconds(after) < 1:
            state = after
    assert len(changes(space, state)) > 10
    found = ablate(space, Wanted(over, move.index), state, 1.0)
    assert found.total == len(changes(space, state)) and found.idle > 5
    (row,) = [row for row in found.rows if row.lost]
    assert row.lost == pytest.approx(10.0) and row.index in (over, move.index)
