"""What every strategy shares: one step after another, with the books kept.

A strategy is a *step*: a function from one :class:`Point` to the next.  A point is immutable and
holds everything that a step may change, the state of the random generator included, so that an
interruption in the midst of a step leaves the last whole point behind and a resumed search takes
the very same step again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, NamedTuple

import numpy as np

from nostall.core import (
    BadInput,
    BadRun,
    Budget,
    Checkpoint,
    ContractBroken,
    Measurement,
    Objective,
    Observer,
    SearchResult,
    Space,
    Tags,
    Trial,
)
from nostall.core.search import BudgetClock, Stop
from nostall.core.space import M, S

CHECKPOINT_SECONDS = 2.0
_SECONDS = "seconds"


class Point(NamedTuple, Generic[S]):
    """Where a search stands between two steps.  ``value`` is that of ``current``."""

    current: S
    value: float
    best: S
    best_measurement: Measurement
    evaluations: int
    rejected: int
    memory: dict[str, float]
    rng: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task(Generic[S, M]):
    """What stays the same during a search."""

    strategy: str
    space: Space[S, M]
    objective: Objective[S]
    clock: BudgetClock
    seed: int
    rng: np.random.Generator
    observers: Sequence[Observer]
    start: S
    start_measurement: Measurement

    def measure(self, state: S) -> Measurement:
        """Evaluate one state; raises :class:`ContractBroken` when the objective miscounts."""
        return _measure(self.objective, [state])[0]

    def measure_ahead(self, state: S, ahead: Iterator[S]) -> Measurement:
        """The same, while the objective may prepare what ``ahead`` gives."""
        return self.objective.measure(state, ahead)

    def progress(self, evaluations: int) -> float:
        """The part of the budget that is spent, 0 to 1.

        Counted in evaluations where the budget limits them, because only that is reproducible;
        in seconds otherwise.
        """
        budget = self.clock.budget
        if budget.evaluations is not None:
            return min(1.0, evaluations / budget.evaluations)
        if budget.seconds is None:
            return 1.0
        return min(1.0, self.clock.elapsed / budget.seconds)


Step = Callable[[Point[S]], "Point[S] | Stop"]
Memory = Callable[[Point[S]], dict[str, float]]


def begin(
    strategy: str,
    space: Space[S, M],
    objective: Objective[S],
    budget: Budget,
    seed: int,
    observers: Sequence[Observer],
    resume: Checkpoint | None,
    memory: dict[str, float],
) -> tuple[Task[S, M], Point[S]]:
    """Measure the start state and set out from it, or from where ``resume`` left off.

    A budget is a total: a resumed search has what its predecessors left.  It measures the start
    and the best state again, because a checkpoint holds their values only; these two are not
    charged.  Raises :class:`BadRun` for a checkpoint of another search, :class:`BadInput` when the
    start state cannot be measured; an interruption before that has nothing to return and is
    passed on.
    """
    rng = np.random.default_rng(seed)
    start = space.start()
    if resume is None:
        clock = budget.clock()
        measurement = _measure_start(_measure(objective, [start])[0])
        task = Task(strategy, space, objective, clock, seed, rng, observers, start, measurement)
        point = Point(
            start, measurement.value, start, measurement, 1, 0, memory, rng.bit_generator.state
        )
        if observers:
            tell(task, Trial(0, point.value, True, point.value, "start", 0, clock.elapsed))
        return task, point

    _restore(rng, resume, strategy, seed)
    current, best = space.load(resume.current), space.load(resume.best)
    again = _measure(objective, [start, best])
    measurement = _measure_start(again[0])
    if again[1].failure is not None:
        best, again = start, [measurement, measurement]
    held = {**memory, **resume.memory}
    clock = BudgetClock(budget, monotonic() - held.pop(_SECONDS, 0.0))
    task = Task(strategy, space, objective, clock, seed, rng, observers, start, measurement)
    return task, Point(
        current,
        resume.current_value,
        best,
        again[1],
        resume.evaluations,
        resume.rejected,
        held,
        rng.bit_generator.state,
    )


def run(
    task: Task[S, M], point: Point[S], step: Step[S], memory: Memory[S] | None = None
) -> SearchResult[S]:
    """Take steps until the budget is spent, the step says stop, or Ctrl-C.

    ``memory`` says what a checkpoint keeps beyond ``point.memory``.  Observers get a checkpoint
    every ``CHECKPOINT_SECONDS`` and at the end.
    """
    clock = task.clock
    stopped: Stop = "budget"
    due = monotonic() + CHECKPOINT_SECONDS
    try:
        while not clock.spent(point.evaluations):
            outcome = step(point)
            if isinstance(outcome, str):
                stopped = outcome
                break
            point = outcome
            if monotonic() >= due:
                tell(task, checkpoint(task, point, memory))
                due = monotonic() + CHECKPOINT_SECONDS
    except KeyboardInterrupt:
        stopped = "interrupted"
    return conclude(task, point, stopped, memory)


def conclude(
    task: Task[S, M], point: Point[S], stopped: Stop, memory: Memory[S] | None = None
) -> SearchResult[S]:
    """The result of a search that ends at ``point``; observers get the last checkpoint."""
    last = checkpoint(task, point, memory)
    tell(task, last)
    return SearchResult(
        best=point.best,
        best_measurement=point.best_measurement,
        start_measurement=task.start_measurement,
        evaluations=point.evaluations,
        rejected=point.rejected,
        seconds=task.clock.elapsed,
        stopped=stopped,
        checkpoint=last,
    )


def settle(
    task: Task[S, M],
    point: Point[S],
    move: object,
    candidate: S,
    measurement: Measurement,
    accepted: bool,
    memory: dict[str, float],
    rejected: int = 0,
) -> Point[S]:
    """The point after ``candidate`` was evaluated; tells the observers.

    A failed measurement is never accepted and never best, whatever ``accepted`` says.
    """
    value = measurement.value
    failed = measurement.failure is not None
    accepted = accepted and not failed
    better = not failed and value < point.best_measurement.value
    best, best_measurement = (
        (candidate, measurement) if better else (point.best, point.best_measurement)
    )
    rejected += point.rejected
    if task.observers:
        # Told before the point is taken: whoever is interrupted here sees the trial twice, and
        # a log that takes the last row of an index has no gap.
        tell(
            task,
            Trial(
                point.evaluations,
                value,
                accepted,
                best_measurement.value,
                str(move),
                rejected,
                task.clock.elapsed,
                measurement.failure,
            ),
        )
    return Point(
        candidate if accepted else point.current,
        value if accepted else point.value,
        best,
        best_measurement,
        point.evaluations + 1,
        rejected,
        memory,
        task.rng.bit_generator.state,
    )


def move_to(
    task: Task[S, M],
    point: Point[S],
    state: S,
    value: float,
    memory: dict[str, float],
    rejected: int = 0,
) -> Point[S]:
    """The point after going to a state of known value: nothing is charged."""
    return Point(
        state,
        value,
        point.best,
        point.best_measurement,
        point.evaluations,
        point.rejected + rejected,
        memory,
        task.rng.bit_generator.state,
    )


def draw_legal(
    space: Space[S, M], state: S, rng: np.random.Generator, wanted: Tags
) -> tuple[M | None, int]:
    """``Space.propose`` with the illegal draws counted: a legal move (None if none), the count."""
    for rejected in range(space.max_draws):
        move = space.draw(state, rng, wanted)
        if move is not None:
            return move, rejected
    legal = [move for move in space.moves(state) if wanted <= move.tags]
    return (legal[int(rng.integers(len(legal)))] if legal else None), space.max_draws


def checkpoint(task: Task[S, M], point: Point[S], memory: Memory[S] | None = None) -> Checkpoint:
    """All that :func:`begin` needs to go on from ``point``."""
    held = point.memory if memory is None else memory(point)
    return Checkpoint(
        strategy=task.strategy,
        seed=task.seed,
        evaluations=point.evaluations,
        rejected=point.rejected,
        current=task.space.dump(point.current),
        current_value=point.value,
        best=task.space.dump(point.best),
        best_value=point.best_measurement.value,
        rng=dict(point.rng),
        memory={**held, _SECONDS: task.clock.elapsed},
    )


def _measure(objective: Objective[S], states: list[S]) -> list[Measurement]:
    measurements = objective.evaluate(states)
    if len(measurements) != len(states):
        raise ContractBroken(
            f"{type(objective).__name__}.evaluate returned {len(measurements)} measurements for "
            f"{len(states)} states; one per state is allowed; check the objective with "
            "nostall.testing.check_objective"
        )
    return measurements


def _measure_start(measurement: Measurement) -> Measurement:
    if measurement.failure is not None:
        raise BadInput(
            f"the start state cannot be measured: {measurement.failure}; a search needs a start "
            "that runs; make the unchanged program run first (`nostall bench` tries it alone)"
        )
    return measurement


def _restore(rng: np.random.Generator, saved: Checkpoint, strategy: str, seed: int) -> None:
    if (saved.strategy, saved.seed) != (strategy, seed):
        raise BadRun(
            f"the checkpoint is of strategy {saved.strategy!r} with seed {saved.seed}, this search "
            f"is {strategy!r} with seed {seed}; both must agree; resume with the checkpoint's own "
            "strategy and seed, or start anew"
        )
    try:
        rng.bit_generator.state = saved.rng
    except (KeyError, TypeError, ValueError) as error:
        raise BadRun(
            f"the checkpoint's random state {str(saved.rng)[:60]} cannot be restored ({error!r}); "
            "allowed is what a search saved; start the run anew"
        ) from error


def tell(task: Task[S, M], news: Trial | Checkpoint) -> None:
    """Pass news on to the observers."""
    for observer in task.observers:
        if isinstance(news, Trial):
            observer.on_trial(news)
        else:
            observer.on_checkpoint(news)
