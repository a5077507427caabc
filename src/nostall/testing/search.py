"""Does a search keep its contract?"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Generic

from nostall.core import BadInput, Budget, Checkpoint, Objective, Search, SearchResult, Space
from nostall.core.space import M, S
from nostall.testing.claim import attempt, broken, claim
from nostall.testing.recording import Diary, InterruptedSpace, PlannedInterrupt, Recorder, recorded

_STOPS = ("budget", "finished", "interrupted", "no legal move")


@dataclass(frozen=True, slots=True)
class _Story(Generic[S]):
    """One run and all that could be seen of it."""

    result: SearchResult[S]
    seen: Recorder[S]
    diary: Diary
    texts: list[str]

    @property
    def steps(self) -> list[tuple[int, float, bool, float, str, int, str | None]]:
        """The trials without their times."""
        return [
            (t.index, t.value, t.accepted, t.best, t.move, t.rejected, t.failure)
            for t in self.diary.trials
        ]


def check_search(
    search: Search,
    space: Space[S, M],
    objective: Objective[S],
    *,
    seed: int = 0,
    evaluations: int = 120,
) -> None:
    """Run ``search`` some ten times on a modelled objective and check every promise.

    Checked are: the budget in evaluations and in seconds; a best that is the best of what was
    evaluated and no worse than the start; trials and checkpoints told to observers; the same
    result for the same seed; an interruption, in the objective and in the space, that keeps what
    was found; a resumed search that goes the way of the uninterrupted one; and failed states that
    are neither accepted nor best.  Raises :class:`~nostall.core.ContractBroken` at the first that
    is not kept, :class:`~nostall.core.BadInput` for a measured objective, which repeats nothing.
    """
    if objective.kind != "modelled" or evaluations < 8:
        raise BadInput(
            f"check_search got a {objective.kind!r} objective and {evaluations} evaluations; "
            "allowed are a modelled objective and at least 8; try nostall.testing.Disorder()"
        )
    claim(
        isinstance(getattr(search, "name", None), str),
        "a search must have a name",
        getattr(search, "name", None),
        "a str in the class variable `name`",
        "set it",
    )
    budget = Budget(evaluations=evaluations)

    def story(
        space: Space[S, M],
        seen: Recorder[S],
        budget: Budget = budget,
        resume: Checkpoint | None = None,
    ) -> _Story[S]:
        diary = Diary()
        try:
            result = attempt(
                lambda: search.run(
                    space, seen, budget, seed=seed, observers=[diary], resume=resume
                ),
                "run() raised",
                "a SearchResult",
                "handle what the space and the objective may answer",
            )
        except PlannedInterrupt as error:
            raise broken(
                "run() let KeyboardInterrupt through",
                error,
                "a SearchResult with stopped='interrupted'",
                "catch it around the whole loop, proposals included",
            ) from error
        return _Story(result, seen, diary, [space.dump(state) for state in seen.states])

    whole = story(space, recorded(objective))
    _check_books(whole, space, evaluations)
    _check_same(story(space, recorded(objective)), whole, space)
    one = story(space, recorded(objective), Budget(evaluations=1))
    _check_books(one, space, 1)
    _check_seconds(story(space, recorded(objective), Budget(seconds=0.02)))
    _check_failures(space, objective, story, evaluations)
    count = whole.result.evaluations
    for at in sorted({2, count // 3, count // 2, count - 1}):
        if 1 <= at < count:
            cut = story(space, recorded(objective, interrupt_at=at))
            _check_interrupted(cut, space, evaluations)
            _check_resumed(cut, whole, space, objective, story)
    for calls in (1, 2, count // 2, count):
        halting: Space[S, M] = InterruptedSpace(space, calls)
        cut = story(halting, recorded(objective))
        if cut.texts != whole.texts:
            _check_interrupted(cut, space, evaluations)
            _check_resumed(cut, whole, space, objective, story)


_Tell = Callable[..., _Story[S]]


def _check_books(story: _Story[S], space: Space[S, M], evaluations: int) -> None:
    """Budget, best, observers: what holds for every run that was not resumed."""
    result, seen = story.result, story.seen
    claim(
        len(seen.states) <= evaluations,
        "the budget is overspent",
        f"{len(seen.states)} evaluations",
        f"at most {evaluations}, the start state included",
        "look at the budget before each evaluation",
    )
    claim(
        result.evaluations == len(seen.states),
        "the result miscounts its evaluations",
        result.evaluations,
        f"{len(seen.states)}, the states that the objective saw",
        "count each state handed to the objective",
    )
    claim(
        result.stopped in _STOPS
        and (result.stopped != "budget" or len(seen.states) == evaluations),
        "the result says wrongly why it stopped",
        (result.stopped, len(seen.states)),
        f"one of {_STOPS}, and 'budget' only after {evaluations} evaluations",
        "say 'finished' when the strategy itself ends",
    )
    claim(
        story.texts[:1] == [space.dump(space.start())],
        "the first state evaluated is not the start state",
        story.texts[:1],
        "space.start()",
        "measure the start first: everything is compared with it",
    )
    _check_best(story, space)
    _check_observers(story)


def _check_best(story: _Story[S], space: Space[S, M]) -> None:
    result, seen = story.result, story.seen
    values = [each.value for each in seen.measurements]
    start, best = values[0], result.best_measurement
    claim(
        best.failure is None and best.value <= start,
        "the best is worse than the start",
        best,
        f"a value of at most {start}",
        "begin with the start state as the best",
    )
    claim(
        best.value == min(values),
        "the best is not the best of what was evaluated",
        best.value,
        f"{min(values)}",
        "compare each measurement with the best so far",
    )
    text = space.dump(result.best)
    claim(
        any(
            text == other and value == best.value
            for other, value in zip(story.texts, values, strict=True)
        ),
        "the best state does not have the best measurement",
        text,
        f"a state that was measured at {best.value}",
        "keep the state and its measurement together",
    )
    claim(
        result.start_measurement.value == start,
        "the start's measurement is not that of the start state",
        result.start_measurement.value,
        f"{start}",
        "keep the first measurement",
    )


def _check_observers(story: _Story[S]) -> None:
    trials, measurements = story.diary.trials, story.seen.measurements
    claim(
        [trial.index for trial in trials] == list(range(len(measurements))),
        "observers are not told of each evaluation",
        f"{len(trials)} trials, indices {[trial.index for trial in trials][:8]}",
        f"one Trial for each of {len(measurements)} evaluations, numbered from 0",
        "call on_trial after each evaluation",
    )
    lowest = math.inf
    for trial, measurement in zip(trials, measurements, strict=True):
        lowest = min(lowest, measurement.value)
        claim(
            (trial.value, trial.failure, trial.best)
            == (measurement.value, measurement.failure, lowest),
            f"trial {trial.index} misreports",
            trial,
            f"value {measurement.value}, failure {measurement.failure!r}, best {lowest}",
            "report the measurement and the best including it",
        )
        claim(
            not (trial.accepted and trial.failure),
            "a failed state was accepted",
            trial,
            "accepted=False for a failure",
            "test Measurement.failure before accepting",
        )
    claim(
        story.diary.checkpoints[-1:] == [story.result.checkpoint],
        "observers are not told of the last checkpoint",
        f"{len(story.diary.checkpoints)} checkpoints",
        "the result's checkpoint as the last",
        "call on_checkpoint at the end and after an interruption",
    )
    saved = story.result.checkpoint
    claim(
        (saved.evaluations, saved.best_value)
        == (story.result.evaluations, story.result.best_measurement.value),
        "the last checkpoint is not of the end",
        (saved.evaluations, saved.best_value),
        f"{(story.result.evaluations, story.result.best_measurement.value)}",
        "take it after the last step",
    )


def _check_same(again: _Story[S], whole: _Story[S], space: Space[S, M]) -> None:
    claim(
        again.texts == whole.texts
        and again.steps == whole.steps
        and space.key(again.result.best) == space.key(whole.result.best),
        "the same seed gives another search",
        _parting(again.texts, whole.texts),
        "the same states, trials and best, bit for bit",
        "take all randomness from `seed` and keep no state between runs",
    )


def _check_seconds(story: _Story[S]) -> None:
    claim(
        story.result.seconds < 5.0,
        "a budget of 0.02 s is overspent",
        f"{story.result.seconds:.1f} s",
        "an end soon after the time is up",
        "look at BudgetClock.spent() before each evaluation",
    )


def _check_failures(
    space: Space[S, M], objective: Objective[S], story: _Tell[S], evaluations: int
) -> None:
    start = space.key(space.start())

    def fails(state: S) -> bool:
        key = space.key(state)
        return key != start and sum(key) % 3 != sum(start) % 3

    def fails_always(state: S) -> bool:
        return space.key(state) != start

    for which in (fails, fails_always):
        _check_books(story(space, recorded(objective, fails=which)), space, evaluations)


def _check_interrupted(cut: _Story[S], space: Space[S, M], evaluations: int) -> None:
    claim(
        cut.result.stopped == "interrupted",
        "an interrupted search says that it stopped otherwise",
        cut.result.stopped,
        "'interrupted'",
        "catch KeyboardInterrupt around the whole loop and return what was found",
    )
    if len(cut.texts) == cut.result.evaluations:
        _check_books(cut, space, evaluations)
        return
    raise broken(
        "an interrupted search miscounts",
        cut.result.evaluations,
        f"{len(cut.texts)} evaluations",
        "keep the books per evaluation",
    )


def _check_resumed(
    cut: _Story[S],
    whole: _Story[S],
    space: Space[S, M],
    objective: Objective[S],
    story: _Tell[S],
) -> None:
    done = cut.result.evaluations
    claim(
        cut.texts == whole.texts[:done],
        "the interrupted search went another way",
        _parting(cut.texts, whole.texts),
        "the way of the uninterrupted one up to the interruption",
        "let nothing but the seed and the budget steer it",
    )
    resumed = story(space, recorded(objective), resume=_through_json(cut.result.checkpoint))
    rest = whole.texts[done:]
    tail = resumed.texts[len(resumed.texts) - len(rest) :]
    claim(
        tail == rest and resumed.steps == whole.steps[done:],
        f"a search resumed after {done} evaluations goes another way",
        _parting(tail, rest),
        "the way of the uninterrupted one, bit for bit",
        "keep the generator's state and all that steers the search in the checkpoint",
    )
    ends = [(r.evaluations, r.rejected, r.stopped) for r in (resumed.result, whole.result)]
    claim(
        ends[0] == ends[1]
        and space.key(resumed.result.best) == space.key(whole.result.best)
        and resumed.result.best_measurement.value == whole.result.best_measurement.value,
        "a resumed search ends with another result",
        (ends[0], resumed.result.best_measurement.value),
        f"{(ends[1], whole.result.best_measurement.value)}",
        "restore the counts and the best from the checkpoint",
    )


def _through_json(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint as it comes back from a run directory."""
    text = attempt(
        lambda: json.dumps(asdict(checkpoint)),
        "a checkpoint cannot be written as JSON",
        "numbers, text and dictionaries",
        "convert numpy values before storing them",
    )
    return Checkpoint(**json.loads(text))


def _parting(got: list[str], wanted: list[str]) -> str:
    """Where two sequences of states part."""
    for number, (one, other) in enumerate(zip(got, wanted, strict=False)):
        if one != other:
            return f"state {number} is {one[:40]!r}, not {other[:40]!r}"
    if len(got) != len(wanted):
        return f"{len(got)} states, not {len(wanted)}"
    return "the same states with other trials"
