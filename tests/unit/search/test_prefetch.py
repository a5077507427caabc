"""Prefetched proposals: the search is the same as without, only the time of the work differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from benchmarks.sass.robustness.kill_resume import Synthetic, kernel

from nostall.core import Budget, Measurement, Objective, Trial
from nostall.gpu import Outcome, PendingOutcome
from nostall.sass import Program
from nostall.sass.schedule import Schedule, ScheduleSpace
from nostall.search import Anneal
from nostall.search.anneal import ProposalPrefetcher
from nostall.tuning.gpu_objective import GpuObjective


class Overlapped:
    """A device with asynchronous evaluations."""

    def __init__(self, original: bytes) -> None:
        self.device = Synthetic(original)
        self.info: Mapping[str, str] = self.device.info
        self.pending = 0
        self.prefetched: list[bytes] = []
        self.prefetch_hits = 0

    def evaluate(self, cubin: bytes) -> Outcome:
        return self.device.evaluate(cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        raise AssertionError("a search does not compare")

    def start(self, cubin: bytes) -> PendingOutcome:
        assert self.pending == 0, "a result was not awaited"
        self.pending = 1
        self.prefetch_hits += cubin in self.prefetched
        self.prefetched = []

        def wait() -> Outcome:
            self.pending = 0
            return self.device.evaluate(cubin)

        return PendingOutcome(lambda: False, wait, self.prefetched.append)


class TrialRecorder:
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
    prefetched: list[bool] = []
    propose = ProposalPrefetcher.propose

    def watched(self: Any, state: Any, rng: Any) -> Any:
        prefetched.append(len(self._prefetched) > 0)
        return propose(self, state, rng)

    monkeypatch.setattr(ProposalPrefetcher, "propose", watched)
    trials: list[list[tuple[Any, ...]]] = []
    for device in (Synthetic(original), Overlapped(original)):
        recorder = TrialRecorder()
        objective = GpuObjective(space, device)
        patched: list[Schedule] = []
        patch = objective._patcher.patch
        objective._patcher.patch = lambda s, p=patch, out=patched: out.append(s) or p(s)  # type: ignore[method-assign,func-returns-value]
        Anneal().run(space, objective, Budget(evaluations=60), seed=5, observers=[recorder])
        trials.append(recorder.trials)
        if isinstance(device, Overlapped):
            assert sum(prefetched) >= 55, "no proposal was prefetched"
            assert 100 < len(patched) < 130, "each candidate is patched once"
            assert device.prefetch_hits >= 55, "the next candidate was not prefetched"
        assert objective.phase_seconds["patch"] > 0
        prefetched.clear()
    assert trials[0] == trials[1]
    assert {accepted for _, _, accepted, _, _ in trials[0]} == {True, False}


def test_an_interruption_waits_for_the_pending_evaluation(space: ScheduleSpace) -> None:
    device = Overlapped(kernel().cubin)
    objective = GpuObjective(space, device)

    def interrupted() -> Iterator[Schedule]:
        raise KeyboardInterrupt
        yield space.start()

    with pytest.raises(KeyboardInterrupt):
        objective.measure(space.start(), interrupted())
    assert device.pending == 0
    assert objective.measure(space.start(), iter(())).failure is None


def test_a_proposal_for_another_generator_state_is_not_used(space: ScheduleSpace) -> None:
    prefetcher = ProposalPrefetcher(space, lambda at, state, rng: at.propose(state, rng))
    baseline = ProposalPrefetcher(space, lambda at, state, rng: at.propose(state, rng))
    rng, baseline_rng = np.random.default_rng(3), np.random.default_rng(3)
    start = space.start()
    list(prefetcher.prefetch([start], rng))
    rng.random()
    baseline_rng.random()
    assert str(prefetcher.propose(start, rng)) == str(baseline.propose(start, baseline_rng))
    assert rng.bit_generator.state == baseline_rng.bit_generator.state


class Synchronous(Objective[Schedule]):
    """An objective that evaluates synchronously."""

    kind = "measured"
    unit = "s"

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        return [Measurement("s", (1.0,), "measured") for _ in states]


def test_other_objectives_do_not_prefetch(space: ScheduleSpace) -> None:
    def never() -> Iterator[Schedule]:
        raise AssertionError("a synchronous objective prefetches nothing")
        yield space.start()

    assert Synchronous().measure(space.start(), never()).value == 1.0


class Interrupting(TrialRecorder):
    """Raises Ctrl-C at one trial and keeps the checkpoint after it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at, self.checkpoint = at, None

    def on_trial(self, trial: Trial) -> None:
        super().on_trial(trial)
        if trial.index == self.at:
            raise KeyboardInterrupt

    def on_checkpoint(self, checkpoint: Any) -> None:
        self.checkpoint = checkpoint


def test_a_resumed_search_equals_an_uninterrupted_one(space: ScheduleSpace) -> None:
    original, budget = kernel().cubin, Budget(evaluations=50)
    full, first, second = TrialRecorder(), Interrupting(23), TrialRecorder()
    for recorder, resume in ((full, None), (first, None), (second, first)):
        objective = GpuObjective(space, Overlapped(original))
        checkpoint = resume.checkpoint if resume is not None else None
        Anneal().run(space, objective, budget, seed=2, observers=[recorder], resume=checkpoint)
    assert first.trials[:23] + second.trials == full.trials
