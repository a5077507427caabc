"""Parallel search: one independent search (a chain) on each worker of a farm, merged at the end.

Each chain is an ordinary search with its own seed.  The first chain has the seed of the whole
search, so a single chain equals that search alone.  Chains do not communicate: with replayed
measurements the result depends on the seed and the number of chains only, not on which worker ran
a chain or how often it was restarted.  The finalists of all chains are merged; the race of the
finalists and the final comparison run on one device.
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
from nostall.tuning.gpu_objective import GpuObjective


@dataclass(frozen=True)
class Chain:
    """One search of a worker."""

    run_id: str
    """Identifies the parallel search; see :func:`stop_chains`."""
    search: Search
    device_spec: DeviceSpec
    budget: Budget
    seed: int
    flops: float | None
    """Floating-point operations of one launch, if known."""
    measured_latencies: bool = False
    """Whether issue distances measured on a GPU may lower mined ones."""


@dataclass(frozen=True)
class ChainResult:
    """Result of a chain.  Values are seconds of this chain's GPU; those of other GPUs may differ.

    Schedules are dumped as text (:meth:`Space.dump`).
    """

    start: Measurement
    finalists: tuple[tuple[float, str], ...]
    """(value, schedule) of the finalists."""
    trials: tuple[Trial, ...]
    checkpoint: Checkpoint
    seconds: float
    """Time of the search."""
    stopped: Stop
    outcome_counts: dict[str, int]
    phase_seconds: dict[str, float]
    failures: tuple[str, ...]


class ParallelChains(Search):
    """Runs ``search`` on each worker of a farm.  The budget holds for each chain."""

    def __init__(self, search: Search, farm: WorkerPool, device_spec: DeviceSpec) -> None:
        self.search, self.farm, self.device_spec = search, farm, device_spec

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
        """Run all chains and merge their results.  Ctrl-C stops each chain at its next trial.

        ``resume`` is ignored: chains live in the workers, and a killed parent process leaves no
        state of them, so a resumed run restarts its chains.  Raises :class:`BadInput` if the
        objective is modelled.
        """
        if not isinstance(objective, GpuObjective):
            raise BadInput("several workers need a measured objective; give --objective gpu")
        run_id = uuid4().hex
        measured = getattr(space, "measured_latencies", False)
        chains = [
            Chain(run_id, self.search, self.device_spec, budget, chain_seed, objective.flops,
                  measured)
            for chain_seed in chain_seeds(seed, self.farm.workers)
        ]  # fmt: skip
        results = self.farm.map(
            run_chain, chains, on_interrupt=lambda: self.farm.run_on_all(stop_chains, run_id)
        )
        scale = results[0].start.value
        _merge_into_objective(objective, results, scale)
        for trial in _merge_trials(results, scale):
            for observer in observers:
                # An observer may raise an interrupt that it noted; the chains have ended already.
                with suppress(KeyboardInterrupt):
                    observer.on_trial(trial)
        checkpoint, value = _best_checkpoint(results, scale)
        for observer in observers:
            observer.on_checkpoint(checkpoint)
        start = results[0].start
        return SearchResult(
            best=space.load(checkpoint.best),
            best_measurement=replace(start, samples=(value,)),
            start_measurement=start,
            evaluations=checkpoint.evaluations,
            rejected=checkpoint.rejected,
            seconds=max(result.seconds for result in results),
            stopped=next((r.stopped for r in results if r.stopped != "budget"), "budget"),
            checkpoint=checkpoint,
        )


def chain_seeds(seed: int, count: int) -> list[int]:
    """The seeds of ``count`` chains; the first is ``seed`` itself."""
    further = [int(np.random.SeedSequence((seed, i)).generate_state(1)[0]) for i in range(1, count)]
    return [seed, *further]


_stopped_runs: set[str] = set()
"""Ids of the runs whose chains must stop in this process."""


def stop_chains(run_id: str) -> None:
    """In a worker: stop all chains of a run, started or not, at their next trial."""
    _stopped_runs.add(run_id)


def run_chain(chain: Chain) -> ChainResult:
    """In a worker: run a chain on the worker's device."""
    program = Program.from_cubin(chain.device_spec.kernel.cubin)
    function = program.kernel(chain.device_spec.kernel.name)
    space = ScheduleSpace(program, function, measured_latencies=chain.measured_latencies)
    log = _TrialLog(chain)
    with open_device(chain.device_spec) as device:
        objective = GpuObjective(space, device, chain.flops)
        result = chain.search.run(space, objective, chain.budget, seed=chain.seed, observers=[log])
    return ChainResult(
        result.start_measurement,
        tuple((value, state) for value, state in objective.snapshot()["finalists"]),
        tuple(log.trials[: result.evaluations]),  # without a trial that an interrupt cut off
        result.checkpoint,
        result.seconds,
        result.stopped,
        dict(objective.outcome_counts),
        dict(objective.phase_seconds),
        tuple(objective.failures),
    )


class _TrialLog:
    """Observer that keeps all trials and stops the search if its run is stopped or abandoned."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.trials: list[Trial] = []

    def on_trial(self, trial: Trial) -> None:
        self.trials.append(trial)
        # Not at the start state, because a search without a best state raises the interrupt.
        is_stopped = self.chain.run_id in _stopped_runs
        if trial.index > 0 and (is_stopped or not is_wanted(self.chain.device_spec)):
            raise KeyboardInterrupt

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Do nothing."""


def _merge_into_objective(
    objective: GpuObjective, results: Sequence[ChainResult], scale: float
) -> None:
    """Add finalists and statistics of all chains, with values in seconds of the first chain."""
    finalists: list[Any] = []
    for chain in results:
        start = chain.start.value
        finalists += [[value * scale / start, state] for value, state in chain.finalists]
        objective.outcome_counts.update(chain.outcome_counts)
        for phase, seconds in chain.phase_seconds.items():
            objective.phase_seconds[phase] += seconds
        objective.failures += chain.failures
    objective.restore({"anchor": scale, "finalists": finalists})


def _merge_trials(results: Sequence[ChainResult], scale: float) -> list[Trial]:
    """The trials of all chains, one chain after the other, numbered like those of one search."""
    merged: list[Trial] = []
    best, rejected = math.inf, 0
    for number, chain in enumerate(results):
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


def _best_checkpoint(results: Sequence[ChainResult], scale: float) -> tuple[Checkpoint, float]:
    """The checkpoint of the best chain with the totals of all, and its value.

    The value is in seconds of the first chain.
    """
    values = [r.checkpoint.best_value * scale / r.start.value for r in results]
    value = min(values)
    best = results[values.index(value)].checkpoint
    evaluations = sum(r.checkpoint.evaluations for r in results)
    rejected = sum(r.checkpoint.rejected for r in results)
    merged = replace(best, evaluations=evaluations, rejected=rejected, best_value=value)
    return merged, value
