"""Several searches side by side, one per worker of a farm, as one search.

Each chain is an ordinary search with a seed of its own; the first has the seed that was given, so
one chain is that search alone.  Chains know nothing of each other: which worker ran which, and how
often it had to be begun again, changes nothing, and on recorded measurements the result follows
from the seed and the number of chains alone.  Their finalists are merged, and what follows (the
race, the decision) happens on one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np

from nostall.core import (
    BadInput,
    Budget,
    Checkpoint,
    Measurement,
    Objective,
    Observer,
    Search,
    SearchResult,
    Space,
    Trial,
)
from nostall.core.search import Stop
from nostall.core.space import M, S
from nostall.farm import DeviceSpec, WorkerPool, is_wanted, open_device
from nostall.sass import Program
from nostall.sass.schedule import ScheduleSpace
from nostall.tuning.gpu_objective import MeasuredSchedules


@dataclass(frozen=True)
class Chain:
    """What a worker is asked: one search, from beginning to end.  ``run`` names what it belongs to,
    for :func:`end`."""

    run: str
    search: Search
    opening: DeviceSpec
    budget: Budget
    seed: int
    flops: float | None


@dataclass(frozen=True)
class Found:
    """What it answers.  States are dumped; ``finalists`` and ``start`` are in this chain's own
    seconds, which other GPUs need not share."""

    start: Measurement
    finalists: tuple[tuple[float, str], ...]
    trials: tuple[Trial, ...]
    checkpoint: Checkpoint
    seconds: float
    stopped: Stop
    fates: dict[str, int]
    spent: dict[str, float]
    faults: tuple[str, ...]


class Chains(Search):
    """``search`` once per worker.  A budget holds for each chain."""

    def __init__(self, search: Search, farm: WorkerPool, opening: DeviceSpec) -> None:
        self.search, self.farm, self.opening = search, farm, opening

    def run(
        self,
        space: Space[S, M],
        objective: Objective[S],
        budget: Budget,
        *,
        seed: int = 0,
        observers: Sequence[Observer] = (),
        resume: Checkpoint | None = None,
    ) -> SearchResult[S]:
        """Run all chains and merge them.  Ctrl-C ends each where it stands.

        A resumed run begins its chains anew (``resume`` is not looked at): they live in the
        workers, and a killed parent leaves nothing of them.
        """
        if not isinstance(objective, MeasuredSchedules):
            raise BadInput("several workers measure; give --objective gpu, or one worker")
        name = uuid4().hex
        chains = [
            Chain(name, self.search, self.opening, budget, each, objective.flops)
            for each in seeds(seed, self.farm.workers)
        ]
        found = self.farm.map(
            run_chain, chains, on_interrupt=lambda: self.farm.run_on_all(end, name)
        )
        scale = found[0].start.value
        _adopt(objective, found, scale)
        for trial in _merged(found, scale):
            for observer in observers:
                # Who has heard Ctrl-C, too, passes it on here; the chains have ended by now.
                with suppress(KeyboardInterrupt):
                    observer.on_trial(trial)
        checkpoint, value = _best(found, scale)
        for observer in observers:
            observer.on_checkpoint(checkpoint)
        start = found[0].start
        return SearchResult(
            best=space.load(checkpoint.best),
            best_measurement=replace(start, samples=(value,)),
            start_measurement=start,
            evaluations=checkpoint.evaluations,
            rejected=checkpoint.rejected,
            seconds=max(f.seconds for f in found),
            stopped=next((f.stopped for f in found if f.stopped != "budget"), "budget"),
            checkpoint=checkpoint,
        )


def seeds(seed: int, count: int) -> list[int]:
    """The seeds of ``count`` chains; the first is ``seed`` itself."""
    further = [int(np.random.SeedSequence((seed, i)).generate_state(1)[0]) for i in range(1, count)]
    return [seed, *further]


_ending: set[str] = set()
"""Runs whose chains in this process are to end."""


def end(run: str) -> None:
    """In a worker: the chains of a run end at their next trial, also those that begin later."""
    _ending.add(run)


def run_chain(chain: Chain) -> Found:
    """In a worker: search on the worker's device."""
    program = Program.from_cubin(chain.opening.kernel.cubin)
    space = ScheduleSpace(program, program.kernel(chain.opening.kernel.name))
    log = _Log(chain)
    with open_device(chain.opening) as device:
        measured = MeasuredSchedules(space, device, chain.flops)
        found = chain.search.run(space, measured, chain.budget, seed=chain.seed, observers=[log])
    return Found(
        found.start_measurement,
        tuple((value, state) for value, state in measured.saved()["finalists"]),
        tuple(log.trials[: found.evaluations]),  # one that an end came upon did not count
        found.checkpoint,
        found.seconds,
        found.stopped,
        dict(measured.fates),
        dict(measured.spent),
        tuple(measured.faults),
    )


class _Log:
    """Observer that keeps all trials, and ends a search that is to end or whose parent has gone."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.trials: list[Trial] = []

    def on_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        # Not at the start state: a search that has found nothing yet passes an interrupt on.
        if trial.index > 0 and (self.chain.run in _ending or not is_wanted(self.chain.opening)):
            raise KeyboardInterrupt

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Nothing to keep."""


def _adopt(objective: MeasuredSchedules, found: Sequence[Found], scale: float) -> None:
    """Finalists and books of all chains become the objective's; seconds are the first chain's."""
    kept: list[Any] = []
    for chain in found:
        kept += [[value * scale / chain.start.value, state] for value, state in chain.finalists]
        objective.fates.update(chain.fates)
        for part, seconds in chain.spent.items():
            objective.spent[part] += seconds
        objective.faults += chain.faults
    objective.restore({"anchor": scale, "finalists": kept})


def _merged(found: Sequence[Found], scale: float) -> list[Trial]:
    """The trials of all chains, one chain after the other, as of one search."""
    merged: list[Trial] = []
    best, rejected = math.inf, 0
    for number, chain in enumerate(found):
        factor = scale / chain.start.value
        for trial in chain.trials:
            best = min(best, trial.best * factor)
            merged.append(
                replace(
                    trial,
                    index=len(merged),
                    value=trial.value * factor,
                    best=best,
                    move=f"chain {number}: {trial.move}",
                    rejected=rejected + trial.rejected,
                )
            )
        rejected += chain.checkpoint.rejected
    return merged


def _best(found: Sequence[Found], scale: float) -> tuple[Checkpoint, float]:
    """Where the best chain ended, with the books of all, and its value in the first's seconds."""
    values = [f.checkpoint.best_value * scale / f.start.value for f in found]
    value = min(values)
    best = found[values.index(value)].checkpoint
    total = sum(f.checkpoint.evaluations for f in found)
    rejected = sum(f.checkpoint.rejected for f in found)
    return replace(best, evaluations=total, rejected=rejected, best_value=value), value
