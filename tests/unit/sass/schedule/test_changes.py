"""Changes of a schedule: found, described, undone, and reduced to those that matter."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from tests.unit.papers.game.kernels import transpose

from nostall.core import Measurement, Objective
from nostall.core.measurement import Kind
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.changes import find_changes, undo_change
from nostall.sass.schedule.moves import SetStall, Slide
from nostall.tuning.ablation import ablate


def test_the_start_state_has_no_changes() -> None:
    assert find_changes(transpose(), transpose().start()) == []


def test_a_slide_is_described_and_undone() -> None:
    space = transpose()
    longest = max(
        (m for m in space.moves(space.start()) if isinstance(m, Slide) and m.offset < 0),
        key=lambda m: -m.offset,
    )
    state = space.apply(space.start(), longest)
    slides = [c for c in find_changes(space, state) if isinstance(c.undo, Slide)]
    assert [c.index for c in slides] == [longest.index]
    name = space.function.instructions[longest.index].base
    assert slides[0].text.startswith(f"{name} #{longest.index} hoisted above ")
    assert f"in block {space.graph.block_numbers[longest.index]}" in slides[0].text
    undone = undo_change(space, state, slides[0])
    assert undone is not None and np.array_equal(undone.order, space.start().order)


def test_a_stall_count_is_described_and_undone() -> None:
    space = transpose()
    move = next(m for m in space.moves(space.start()) if isinstance(m, SetStall))
    state = space.apply(space.start(), move)
    (change,) = find_changes(space, state)
    before = space.start().stall[move.index]
    assert f"stall {move.stall} instead of {before}" in change.text
    assert undo_change(space, state, change) == space.start()


@pytest.mark.parametrize("seed", range(4))
def test_undoing_all_changes_leads_to_the_original(seed: int) -> None:
    """At most two changes are left that cannot be undone alone."""
    space, rng = transpose(), np.random.default_rng(seed)
    state = space.start()
    for _ in range(6):
        move = space.propose(state, rng)
        assert move is not None
        state = space.apply(state, move)
    for _ in range(60):
        remaining = find_changes(space, state)
        options = [s for c in remaining if (s := undo_change(space, state, c)) is not None]
        if not options:
            break
        state = options[-1]
    assert len(find_changes(space, state)) <= 2


class PrefersOrder(Objective[Schedule]):
    """A schedule is 10 % faster if ``second`` comes before ``first``; all else has no effect."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, first: int, second: int) -> None:
        self.first, self.second = first, second

    def evaluate(self, states):
        return [Measurement("s", (self._seconds(state),), self.kind) for state in states]

    def _seconds(self, state: Schedule) -> float:
        order = state.order.tolist()
        return 0.9 if order.index(self.second) < order.index(self.first) else 1.0


def test_ablation_keeps_only_the_change_that_matters() -> None:
    space, rng = transpose(), np.random.default_rng(3)
    move = next(m for m in space.moves(space.start()) if isinstance(m, Slide) and m.offset == -3)
    crossed = move.index - 1
    state = space.apply(space.start(), move)
    for _ in range(25):
        step = space.propose(state, rng)
        assert step is not None
        after = space.apply(state, step)
        if PrefersOrder(crossed, move.index)._seconds(after) < 1:
            state = after
    assert len(find_changes(space, state)) > 10
    ablation = ablate(space, PrefersOrder(crossed, move.index), state, 1.0)
    assert (
        ablation.num_changes == len(find_changes(space, state)) and ablation.num_without_effect > 5
    )
    (effect,) = [effect for effect in ablation.effects if effect.loss_percent]
    assert effect.loss_percent == pytest.approx(10.0) and effect.index in (crossed, move.index)
