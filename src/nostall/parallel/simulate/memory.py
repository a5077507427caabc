"""Modelled memory of a plan: parameters with their state, and activations of micro-batches."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.plan.plan import Plan, Stage
from nostall.parallel.plan.workload import Workload
from nostall.parallel.simulate.costs import data_parallel_share
from nostall.parallel.simulate.orders import in_flight_limits
from nostall.parallel.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Memory:
    """Modelled memory of each worker, in bytes per GPU."""

    state: tuple[float, ...]
    """Parameters, gradients and optimiser state."""
    peak: tuple[float, ...]
    """``state`` plus the largest sum of activations during the iteration."""
    capacity: tuple[float, ...]
    """Memory of the worker's smallest GPU."""
    measured: bool
    """Whether the profile has measured stored bytes; otherwise ``peak`` is a lower bound."""

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits; None if ``peak`` fits but is only a lower bound."""
        if any(p > c for p, c in zip(self.peak, self.capacity, strict=True)):
            return False
        return True if self.measured else None


def held_bytes(workload: Workload, stage: Stage, recompute: bool, only_stage: bool) -> float:
    """Bytes per GPU that a stage keeps of one micro-batch from its forward to its backward pass.

    With re-computation, only the stage's input is kept.  ``only_stage`` is pure data parallelism.
    """
    r = len(stage.gpus)
    share = data_parallel_share(workload, r) if only_stage else workload.slice_share(r)
    activations = workload.stored_bytes[stage.end] - workload.stored_bytes[stage.first]
    return share * (workload.cut_bytes[stage.first] if recompute else activations)


def working_bytes(workload: Workload, stage: Stage, recompute: bool, only_stage: bool) -> float:
    """Bytes per GPU needed only during a backward pass: the re-computed activations, if any."""
    return held_bytes(workload, stage, False, only_stage) if recompute else 0.0


def state_bytes(workload: Workload, stage: Stage) -> float:
    """Bytes per GPU of a stage's parameters, gradients and optimiser state."""
    parameters = workload.parameter_bytes[stage.end] - workload.parameter_bytes[stage.first]
    return workload.state_factor * parameters


def may_fit(workload: Workload, plan: Plan) -> bool:
    """Whether the plan fits into memory, judged by its limits on micro-batches in flight.

    Planners use this because it needs no simulation.  For workers with one stage it is what
    :func:`memory` says, if the stages reach their limits: a greedy policy can hold fewer.  For
    workers with several stages it counts one micro-batch per stage, and is True for every plan that
    :func:`memory` accepts.
    """
    state: dict[tuple[int, ...], float] = defaultdict(float)
    held: dict[tuple[int, ...], float] = defaultdict(float)
    peak: dict[tuple[int, ...], float] = defaultdict(float)
    only_stage = len(plan.stages) == 1
    limits = in_flight_limits(plan, workload.micro_batches)
    for stage, limit in zip(plan.stages, limits, strict=True):
        in_flight = 1 if plan.interleaved or only_stage else limit
        state[stage.gpus] += state_bytes(workload, stage)
        held[stage.gpus] += in_flight * held_bytes(workload, stage, plan.recompute, only_stage)
        # While a micro-batch is in a stage's backward pass, the worker's later stages are done.
        working = working_bytes(workload, stage, plan.recompute, only_stage)
        peak[stage.gpus] = max(peak[stage.gpus], held[stage.gpus] + working)
    memory_of = workload.cluster.memory
    return all(state[gpus] + peak[gpus] <= min(memory_of[g] for g in gpus) for gpus in state)


def memory(workload: Workload, plan: Plan, timeline: Timeline) -> Memory:
    """Peak memory of each worker over a simulated iteration."""
    workers = max(timeline.costs.worker) + 1
    state, peak = [0.0] * workers, [0.0] * workers
    capacity = [0.0] * workers
    for s, stage in enumerate(plan.stages):
        w = timeline.costs.worker[s]
        state[w] += state_bytes(workload, stage)
        capacity[w] = min(workload.cluster.memory[g] for g in stage.gpus)
    for w in range(workers):
        peak[w] = state[w] + float(_activation_bytes(workload, plan, timeline, w).max())
    return Memory(tuple(state), tuple(peak), tuple(capacity), workload.profile.memory_measured)


def _activation_bytes(
    workload: Workload, plan: Plan, timeline: Timeline, worker: int
) -> NDArray[np.float64]:
    """Bytes of activations per GPU of a worker after each allocation and release, in time order."""
    only_stage = len(plan.stages) == 1
    last_kind = 2 if timeline.splits_backward else 1
    changes: list[tuple[float, float]] = [(0.0, 0.0)]  # time, bytes allocated (+) or released (-)
    for s, stage in enumerate(plan.stages):
        if timeline.costs.worker[s] != worker:
            continue
        size = held_bytes(workload, stage, plan.recompute, only_stage)
        extra = working_bytes(workload, stage, plan.recompute, only_stage)
        released = timeline.operation_starts[last_kind, s] + timeline.durations[last_kind, s]
        held = list(zip(timeline.operation_starts[0, s], released, strict=True))
        if only_stage:  # a replica runs one micro-batch of its own at a time
            held = [(min(h[0] for h in held), max(h[1] for h in held))]
        for start, end in held:
            changes += [(float(start), size), (float(end), -size)]
        for start in timeline.operation_starts[1, s] if extra else ():
            changes += [(float(start), extra), (float(start + timeline.durations[1, s]), -extra)]
    # At equal times, releases (negative) sort before allocations.
    changes.sort()
    return np.cumsum([size for _, size in changes])
