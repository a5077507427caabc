"""Proposals drawn while the device is busy change nothing but when work is done."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from benchmarks.sass.kill_resume import Synthetic, kernel

from nostall.core import Budget, Measurement, Objective, Trial
from nostall.gpu import Outcome, PendingOutcome
from nostall.sass import Program
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.search import Anneal
from nostall.search.prefetch import Ahead
from nostall.tuning.gpu_objective import MeasuredSchedules


class Overlapped:
    """A device whose answers are awaited."""

    def __init__(self, original: bytes) -> None:
        self.device = Synthetic(original)
        self.info: Mapping[str, str] = self.device.info
        self.pending = 0
        self.foreseen: list[bytes] = []
        self.came = 0

    def evaluate(self, cubin: bytes) -> Outcome:
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        raise AssertionError("only searches")

    def start(self, cubin: bytes) -> PendingOutcome:
        assert self.pending == 0, "an answer was left behind"
        self.pending = 1
        self.came += cubin in self.foreseen
        self.foreseen = []

        def wait() -> Outcome:
            self.pending = 0
            return self.device.evaluate(cubin)

        return PendingOutcome(lambda: False, wait, self.foreseen.append)


class Kept:
    def __init__(self) -> None:
        self.trials: list[tuple[Any, ...]] = []

    def on_trial(self, trial: Trial) -> None:
        self.trials.append((trial.index, trial.value, trial.accepted, trial.move, trial.failure))

    def on_checkpoint(self, checkpoint: object) -> None:
        pass


@pytest.fixture(scope="module")
def space() -> ScheduleSpace:
    program = Program.from_cubin(kernel().cubin)
    return ScheduleSpace(program, program.kernel(kernel().kernel))


def test_a_search_with_overlap_is_the_search_without(
    space: ScheduleSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = kernel().cubin
    drawn: list[bool] = []
    propose = Ahead.propose

    def watched(self: Any, state: Any, rng: Any) -> Any:
        before = len(self._early)
        found = propose(self, state, rng)
        drawn.append(before > 0)
        return found

    monkeypatch.setattr(Ahead, "propose", watched)
    seen: list[list[tuple[Any, ...]]] = []
    for device in (Synthetic(original), Overlapped(original)):
        kept = Kept()
        measured = MeasuredSchedules(space, device)
        patched: list[Schedule] = []
        patch = measured._patcher.patch
        measured._patcher.patch = lambda s, p=patch, kept=patched: kept.append(s) or p(s)  # type: ignore[method-assign,func-returns-value]
        Anneal().run(space, measured, Budget(evaluations=60), seed=5, observers=[kept])
        seen.append(kept.trials)
        if isinstance(device, Overlapped):
            assert sum(drawn) >= 55, "nothing was drawn early"
            assert 100 < len(patched) < 130, "each candidate is patched once"
            assert device.came >= 55, "what came next was not told"
        assert measured.spent["patch"] > 0
        drawn.clear()
    assert seen[0] == seen[1]
    assert {accepted for _, _, accepted, _, _ in seen[0]} == {True, False}


def test_an_interruption_takes_the_answer_with_it(space: ScheduleSpace) -> None:
    device = Overlapped(kernel().cubin)
    measured = MeasuredSchedules(space, device)

    def interrupted() -> Iterator[Schedule]:
        raise KeyboardInterrupt
        yield space.start()

    with pytest.raises(KeyboardInterrupt):
        measured.measure(space.start(), interrupted())
    assert device.pending == 0
    assert measured.measure(space.start(), iter(())).failure is None


def test_a_proposal_for_another_end_is_not_taken(space: ScheduleSpace) -> None:
    ahead = Ahead(space, lambda at, state, rng: at.propose(state, rng))
    alone = Ahead(space, lambda at, state, rng: at.propose(state, rng))
    rng, again = np.random.default_rng(3), np.random.default_rng(3)
    start = space.start()
    list(ahead.look([start], rng))
    rng.random()
    again.random()
    assert str(ahead.propose(start, rng)) == str(alone.propose(start, again))
    assert rng.bit_generator.state == again.bit_generator.state


class Eager(Objective[Schedule]):
    """An objective that waits for nothing."""

    kind = "measured"
    unit = "s"

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        return [Measurement("s", (1.0,), "measured") for _ in states]


def test_other_objectives_leave_what_is_ahead_alone(space: ScheduleSpace) -> None:
    def never() -> Iterator[Schedule]:
        raise AssertionError("nobody waits")
        yield space.start()

    assert Eager().measure(space.start(), never()).value == 1.0


class Interrupting(Kept):
    """Ctrl-C at one trial; keeps the checkpoint that follows."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.checkpoint = at, None

    def on_trial(self, trial: Trial) -> None:
        super().on_trial(trial)
        if trial.index == self.at:
            raise KeyboardInterrupt

    def on_checkpoint(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint


def test_an_interrupted_search_goes_on_as_if_nothing_had_happened(space: ScheduleSpace) -> None:
    original, budget = kernel().cubin, Budget(evaluations=50)
    alone, first, second = Kept(), Interrupting(23), Kept()
    for kept, resume in ((alone, None), (first, None), (second, first)):
        measured = MeasuredSchedules(space, Overlapped(original))
        at = resume.checkpoint if resume is not None else None
        Anneal().run(space, measured, budget, seed=2, observers=[kept], resume=at)
    assert first.trials[:23] + second.trials == alone.trials
