"""Conformance check of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic

from nostall.core import BadInput, Budget, Checkpoint, Objective, Search, SearchResult, Space
from nostall.core.space import M, S
from nostall.testing.contract import attempt, contract_error, require
from nostall.testing.recording import (
    InterruptedSpace,
    PlannedInterrupt,
    RecordingObjective,
    RecordingObserver,
    record_evaluations,
)

_STOPS = ("budget", "finished", "interrupted", "no legal move")


@dataclass(frozen=True, slots=True)
class _Run(Generic[S]):
    """One run of the search, with all that the objective and the observer recorded."""

    result: SearchResult[S]
    objective: RecordingObjective[S]
    observer: RecordingObserver
    texts: list[str]
    """Dumps of the evaluated states."""

    @property
    def trials(self) -> list[tuple[int, float, bool, float, str, int, str | None]]:
        """The trials without their times."""
        return [
            (t.index, t.value, t.accepted, t.best, t.move, t.rejected, t.failure)
            for t in self.observer.trials
        ]


@dataclass(frozen=True)
class _Runner:
    """Runs one search with one seed and records what happens."""

    search: Search
    seed: int
    budget: Budget

    def run(
        self,
        space: Space[S, M],
        objective: RecordingObjective[S],
        budget: Budget | None = None,
        resume: Checkpoint | None = None,
    ) -> _Run[S]:
        observer = RecordingObserver()
        try:
            result = attempt(
                lambda: self.search.run(
                    space,
                    objective,
                    budget or self.budget,
                    seed=self.seed,
                    observers=[observer],
                    resume=resume,
                ),
                "run() raised",
                "a SearchResult",
                "handle what the space and the objective may return",
            )
        except PlannedInterrupt as error:
            raise contract_error(
                "run() let KeyboardInterrupt through",
                error,
                "a SearchResult with stopped='interrupted'",
                "catch it around the whole loop, proposals included",
            ) from error
        return _Run(result, objective, observer, [space.dump(s) for s in objective.states])


def check_search(
    search: Search,
    space: Space[S, M],
    objective: Objective[S],
    *,
    seed: int = 0,
    evaluations: int = 120,
) -> None:
    """Run ``search`` about ten times on a modelled objective and check the results.

    The contract: the budget holds, in evaluations and in seconds; the best state is the best of
    the evaluated ones and no worse than the start state; observers get all trials and
    checkpoints; the same seed gives the same result; an interruption, in the objective or in the
    space, returns the best so far; a resumed search visits the same states as an uninterrupted
    one; failed states are neither accepted nor the best.

    Raises :class:`~nostall.core.ContractBroken` at the first violation, and
    :class:`~nostall.core.BadInput` for a measured objective, whose values do not repeat.
    """
    if objective.kind != "modelled" or evaluations < 8:
        raise BadInput(
            f"check_search got a {objective.kind!r} objective and {evaluations} evaluations; "
            "allowed are a modelled objective and at least 8; try nostall.testing.Disorder()"
        )
    require(
        isinstance(getattr(search, "name", None), str),
        "a search must have a name",
        getattr(search, "name", None),
        "a str in the class variable `name`",
        "set it",
    )
    runner = _Runner(search, seed, Budget(evaluations=evaluations))
    full = runner.run(space, record_evaluations(objective))
    _check_counts(full, space, evaluations)
    _check_same(runner.run(space, record_evaluations(objective)), full, space)
    single = runner.run(space, record_evaluations(objective), Budget(evaluations=1))
    _check_counts(single, space, 1)
    _check_seconds(runner.run(space, record_evaluations(objective), Budget(seconds=0.02)))
    _check_failures(runner, space, objective, evaluations)
    for interrupted in _interrupted_runs(runner, space, objective, full):
        _check_interrupted(interrupted, space, evaluations)
        _check_resumed(runner, interrupted, full, space, objective)


def _interrupted_runs(
    runner: _Runner, space: Space[S, M], objective: Objective[S], full: _Run[S]
) -> Iterator[_Run[S]]:
    """Runs that Ctrl-C interrupts at different places in the objective and in the space."""
    count = full.result.evaluations
    for evaluation in sorted({2, count // 3, count // 2, count - 1}):
        if 1 <= evaluation < count:
            yield runner.run(space, record_evaluations(objective, interrupt_at=evaluation))
    for calls in (1, 2, count // 2, count):
        interrupting: Space[S, M] = InterruptedSpace(space, calls)
        run = runner.run(interrupting, record_evaluations(objective))
        if run.texts != full.texts:
            yield run


def _check_counts(run: _Run[S], space: Space[S, M], evaluations: int) -> None:
    """Check budget, best state and observers of a run that was not resumed."""
    result, states = run.result, run.objective.states
    require(
        len(states) <= evaluations,
        "the budget is overspent",
        f"{len(states)} evaluations",
        f"at most {evaluations}, the start state included",
        "check the budget before each evaluation",
    )
    require(
        result.evaluations == len(states),
        "the result miscounts its evaluations",
        result.evaluations,
        f"{len(states)}, the states that the objective evaluated",
        "count each state passed to the objective",
    )
    require(
        result.stopped in _STOPS and (result.stopped != "budget" or len(states) == evaluations),
        "the result gives a wrong reason why it stopped",
        (result.stopped, len(states)),
        f"one of {_STOPS}, and 'budget' only after {evaluations} evaluations",
        "return 'finished' if the strategy itself ends",
    )
    require(
        run.texts[:1] == [space.dump(space.start())],
        "the first state evaluated is not the start state",
        run.texts[:1],
        "space.start()",
        "measure the start first: all other states are compared with it",
    )
    _check_best(run, space)
    _check_observer(run)


def _check_best(run: _Run[S], space: Space[S, M]) -> None:
    result = run.result
    values = [measurement.value for measurement in run.objective.measurements]
    start, best = values[0], result.best_measurement
    require(
        best.failure is None and best.value <= start,
        "the best is worse than the start",
        best,
        f"a value of at most {start}",
        "begin with the start state as the best",
    )
    require(
        best.value == min(values),
        "the best is not the best of what was evaluated",
        best.value,
        f"{min(values)}",
        "compare each measurement with the best so far",
    )
    best_text = space.dump(result.best)
    require(
        any(
            text == best_text and value == best.value
            for text, value in zip(run.texts, values, strict=True)
        ),
        "the best state does not have the best measurement",
        best_text,
        f"a state that was measured at {best.value}",
        "keep the state and its measurement together",
    )
    require(
        result.start_measurement.value == start,
        "the start's measurement is not that of the start state",
        result.start_measurement.value,
        f"{start}",
        "keep the first measurement",
    )


def _check_observer(run: _Run[S]) -> None:
    trials, measurements = run.observer.trials, run.objective.measurements
    require(
        [trial.index for trial in trials] == list(range(len(measurements))),
        "observers do not get a trial for each evaluation",
        f"{len(trials)} trials, indices {[trial.index for trial in trials][:8]}",
        f"one Trial for each of {len(measurements)} evaluations, numbered from 0",
        "call on_trial after each evaluation",
    )
    lowest = math.inf
    for trial, measurement in zip(trials, measurements, strict=True):
        lowest = min(lowest, measurement.value)
        require(
            (trial.value, trial.failure, trial.best)
            == (measurement.value, measurement.failure, lowest),
            f"trial {trial.index} misreports",
            trial,
            f"value {measurement.value}, failure {measurement.failure!r}, best {lowest}",
            "report the measurement, and the best value with this one",
        )
        require(
            not (trial.accepted and trial.failure),
            "a failed state was accepted",
            trial,
            "accepted=False for a failure",
            "test Measurement.failure before accepting",
        )
    checkpoints, result = run.observer.checkpoints, run.result
    require(
        checkpoints[-1:] == [result.checkpoint],
        "observers do not get the last checkpoint",
        f"{len(checkpoints)} checkpoints",
        "the result's checkpoint as the last",
        "call on_checkpoint at the end and after an interruption",
    )
    saved = (result.checkpoint.evaluations, result.checkpoint.best_value)
    end = (result.evaluations, result.best_measurement.value)
    require(
        saved == end,
        "the last checkpoint is not that of the end",
        saved,
        f"{end}",
        "write it after the last step",
    )


def _check_same(second: _Run[S], first: _Run[S], space: Space[S, M]) -> None:
    require(
        second.texts == first.texts
        and second.trials == first.trials
        and space.key(second.result.best) == space.key(first.result.best),
        "the same seed gives another search",
        _first_difference(second.texts, first.texts),
        "the same states, trials and best, bit for bit",
        "take all randomness from `seed` and keep no state between runs",
    )


def _check_seconds(run: _Run[S]) -> None:
    require(
        run.result.seconds < 5.0,
        "a budget of 0.02 s is overspent",
        f"{run.result.seconds:.1f} s",
        "an end soon after the time is up",
        "check BudgetClock.spent() before each evaluation",
    )


def _check_failures(
    runner: _Runner, space: Space[S, M], objective: Objective[S], evaluations: int
) -> None:
    """Check runs in which some states fail, and in which all but the start state fail."""
    start = space.key(space.start())

    def fails_often(state: S) -> bool:
        key = space.key(state)
        return key != start and sum(key) % 3 != sum(start) % 3

    def fails_always(state: S) -> bool:
        return space.key(state) != start

    for fails in (fails_often, fails_always):
        run = runner.run(space, record_evaluations(objective, fails=fails))
        _check_counts(run, space, evaluations)


def _check_interrupted(run: _Run[S], space: Space[S, M], evaluations: int) -> None:
    require(
        run.result.stopped == "interrupted",
        "an interrupted search gives another reason why it stopped",
        run.result.stopped,
        "'interrupted'",
        "catch KeyboardInterrupt around the whole loop and return the best so far",
    )
    require(
        len(run.texts) == run.result.evaluations,
        "an interrupted search miscounts",
        run.result.evaluations,
        f"{len(run.texts)} evaluations",
        "update the counts and the best after each evaluation",
    )
    _check_counts(run, space, evaluations)


def _check_resumed(
    runner: _Runner,
    interrupted: _Run[S],
    full: _Run[S],
    space: Space[S, M],
    objective: Objective[S],
) -> None:
    """Resume an interrupted run and check that it continues like the uninterrupted one."""
    done = interrupted.result.evaluations
    require(
        interrupted.texts == full.texts[:done],
        "the interrupted search visits other states",
        _first_difference(interrupted.texts, full.texts),
        "the states of the uninterrupted one, up to the interruption",
        "let the search depend on nothing but the seed and the budget",
    )
    checkpoint = _through_json(interrupted.result.checkpoint)
    resumed = runner.run(space, record_evaluations(objective), resume=checkpoint)
    expected = full.texts[done:]
    # A resumed search may first measure the start state and the best state again.
    texts = resumed.texts[len(resumed.texts) - len(expected) :]
    require(
        texts == expected and resumed.trials == full.trials[done:],
        f"a search resumed after {done} evaluations visits other states",
        _first_difference(texts, expected),
        "the states and trials of the uninterrupted one, bit for bit",
        "save the generator's state and all that steers the search in the checkpoint",
    )
    ends = [(r.evaluations, r.rejected, r.stopped) for r in (resumed.result, full.result)]
    require(
        ends[0] == ends[1]
        and space.key(resumed.result.best) == space.key(full.result.best)
        and resumed.result.best_measurement.value == full.result.best_measurement.value,
        "a resumed search ends with another result",
        (ends[0], resumed.result.best_measurement.value),
        f"{(ends[1], full.result.best_measurement.value)}",
        "restore the counts and the best from the checkpoint",
    )


def _through_json(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint after a round trip through JSON, as in a run directory."""
    text = attempt(
        checkpoint.dump,
        "a checkpoint cannot be written as JSON",
        "numbers, text and dictionaries",
        "convert numpy values before storing them",
    )
    return Checkpoint.load(text)


def _first_difference(texts: list[str], expected: list[str]) -> str:
    """The first difference of two sequences of states, in words."""
    for number, (text, expected_text) in enumerate(zip(texts, expected, strict=False)):
        if text != expected_text:
            return f"state {number} is {text[:40]!r}, not {expected_text[:40]!r}"
    if len(texts) != len(expected):
        return f"{len(texts)} states, not {len(expected)}"
    return "the same states with other trials"
