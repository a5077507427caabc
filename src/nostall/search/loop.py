"""Search loop of all strategies: runs steps, counts evaluations and writes checkpoints.

A strategy is a *step*: a function from one :class:`Point` to the next. A point is immutable and
holds all that a step may change, with the state of the random generator. So an interruption within
a step leaves the last complete point, and a resumed search repeats the same step.
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
"""Interval of the checkpoints."""
_SECONDS = "seconds"
"""Key of a checkpoint's memory: seconds that the search has run."""


class Point(NamedTuple, Generic[S]):
    """State of a search between two steps."""

    current: S
    value: float
    """Value of ``current``."""
    best: S
    best_measurement: Measurement
    evaluations: int
    """Evaluations so far, with that of the start state."""
    rejected: int
    """Illegal proposals so far."""
    memory: dict[str, float]
    """Numbers that the strategy keeps from step to step."""
    rng: Mapping[str, Any]
    """State of the random generator."""
    population: Any = None
    """Further states of the strategy, an immutable object with ``dump(space)``, or None."""


@dataclass(frozen=True, slots=True)
class Task(Generic[S, M]):
    """Inputs of a search, which stay the same while it runs."""

    strategy: str
    space: Space[S, M]
    objective: Objective[S]
    clock: BudgetClock
    seed: int
    rng: np.random.Generator
    observers: Sequence[Observer]
    start: S
    start_measurement: Measurement
    chooses_best: bool = False
    """Whether the strategy sets the best state of a point itself; otherwise the lowest value
    decides."""

    def measure(self, state: S) -> Measurement:
        """Evaluate one state; raises :class:`ContractBroken` if it gets no single measurement."""
        return _measure(self.objective, [state])[0]

    def measure_with_prefetch(self, state: S, candidates: Iterator[S]) -> Measurement:
        """Evaluate one state; meanwhile the objective may prepare the next candidates."""
        return self.objective.measure(state, candidates)

    def progress(self, evaluations: int) -> float:
        """Part of the budget that is spent, 0 to 1.

        A limit of evaluations takes precedence over one of seconds, because it is reproducible.
        """
        budget = self.clock.budget
        if budget.evaluations is not None:
            return min(1.0, evaluations / budget.evaluations)
        if budget.seconds is None:
            return 1.0
        return min(1.0, self.clock.elapsed / budget.seconds)


Step = Callable[[Point[S]], "Point[S] | Stop"]
"""Returns the next point, or the reason to stop."""
Memory = Callable[[Point[S]], dict[str, float]]
"""Returns the memory of a checkpoint at a point."""


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
    """Measure the start state; returns the task and its first point, or the point of ``resume``.

    ``memory`` is that of the first point. The budget is a total: a resumed search gets what its
    predecessors left. It measures the start state and the best state again, because a checkpoint
    holds only their values; these two measurements are not counted.

    Raises :class:`BadRun` for a checkpoint of another search and :class:`BadInput` if the start
    state cannot be measured. An interruption is passed on, because there is no result yet.
    """
    rng = np.random.default_rng(seed)
    start = space.start()
    if resume is None:
        clock = budget.clock()
        measurement = _require_success(_measure(objective, [start])[0])
        task = Task(strategy, space, objective, clock, seed, rng, observers, start, measurement)
        point = Point(
            start, measurement.value, start, measurement, 1, 0, memory, rng.bit_generator.state
        )
        if observers:
            notify(task, Trial(0, point.value, True, point.value, "start", 0, clock.elapsed))
        return task, point

    _restore(rng, resume, strategy, seed)
    current, best = space.load(resume.current), space.load(resume.best)
    start_measurement, best_measurement = _measure(objective, [start, best])
    measurement = _require_success(start_measurement)
    if best_measurement.failure is not None:
        best, best_measurement = start, measurement
    restored = {**memory, **resume.memory}
    clock = BudgetClock(budget, monotonic() - restored.pop(_SECONDS, 0.0))
    task = Task(strategy, space, objective, clock, seed, rng, observers, start, measurement)
    return task, Point(
        current,
        resume.current_value,
        best,
        best_measurement,
        resume.evaluations,
        resume.rejected,
        restored,
        rng.bit_generator.state,
    )


def run(
    task: Task[S, M], point: Point[S], step: Step[S], memory: Memory[S] | None = None
) -> SearchResult[S]:
    """Run steps until the budget is spent, a step returns a reason to stop, or Ctrl-C.

    ``memory`` returns the memory of a checkpoint (None: that of the point). Observers get a
    checkpoint every ``CHECKPOINT_SECONDS`` and at the end.
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
                notify(task, checkpoint(task, point, memory))
                due = monotonic() + CHECKPOINT_SECONDS
    except KeyboardInterrupt:
        stopped = "interrupted"
    return conclude(task, point, stopped, memory)


def conclude(
    task: Task[S, M], point: Point[S], stopped: Stop, memory: Memory[S] | None = None
) -> SearchResult[S]:
    """The result of a search that ends at ``point``; sends the last checkpoint to observers."""
    last = checkpoint(task, point, memory)
    notify(task, last)
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


def record_trial(
    task: Task[S, M],
    point: Point[S],
    move: object,
    candidate: S,
    measurement: Measurement,
    accepted: bool,
    memory: dict[str, float],
    rejected: int = 0,
) -> Point[S]:
    """Record the evaluation of ``candidate`` and notify observers; returns the next point.

    A failed candidate is never accepted and never the best, even if ``accepted`` is true.
    ``rejected`` is the number of illegal proposals before this one.
    """
    value = measurement.value
    failed = measurement.failure is not None
    accepted = accepted and not failed
    better = not (failed or task.chooses_best) and value < point.best_measurement.value
    best, best_measurement = (
        (candidate, measurement) if better else (point.best, point.best_measurement)
    )
    rejected += point.rejected
    if task.observers:
        # Observers get the trial before the search takes the point. After an interruption here
        # they get it twice, and a log that uses the last row of each index has no gap.
        notify(
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
    """The point after a move to a state of known value; counts no evaluation."""
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
    space: Space[S, M], state: S, rng: np.random.Generator, required_tags: Tags
) -> tuple[M | None, int]:
    """A legal move as from ``Space.propose``, None without any, and the number of illegal draws."""
    for rejected in range(space.max_draws):
        move = space.draw(state, rng, required_tags)
        if move is not None:
            return move, rejected
    legal = [move for move in space.moves(state) if required_tags <= move.tags]
    return (legal[int(rng.integers(len(legal)))] if legal else None), space.max_draws


def checkpoint(task: Task[S, M], point: Point[S], memory: Memory[S] | None = None) -> Checkpoint:
    """The checkpoint from which :func:`begin` continues at ``point``."""
    memory_entries = point.memory if memory is None else memory(point)
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
        memory={**memory_entries, _SECONDS: task.clock.elapsed},
        population=[] if point.population is None else point.population.dump(task.space),
    )


def _measure(objective: Objective[S], states: list[S]) -> list[Measurement]:
    measurements = objective.evaluate(states)
    if len(measurements) != len(states):
        raise ContractBroken(
            f"{type(objective).__name__}.evaluate returned {len(measurements)} measurements for "
            f"{len(states)} states; it must return one per state; check the objective with "
            "nostall.testing.check_objective"
        )
    return measurements


def _require_success(measurement: Measurement) -> Measurement:
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
            "strategy and seed, or start a new run"
        )
    try:
        rng.bit_generator.state = saved.rng
    except (KeyError, TypeError, ValueError) as error:
        raise BadRun(
            f"the checkpoint's random state {str(saved.rng)[:60]} cannot be restored ({error!r}); "
            "allowed is the state that a search saved; start a new run"
        ) from error


def notify(task: Task[S, M], event: Trial | Checkpoint) -> None:
    """Send a trial or a checkpoint to the observers."""
    for observer in task.observers:
        if isinstance(event, Trial):
            observer.on_trial(event)
        else:
            observer.on_checkpoint(event)
