"""Memory of a plan: parameters with their state, and what waits for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nostall.parallel.plan.plan import Plan, Stage
from nostall.parallel.plan.workload import Workload
from nostall.parallel.simulate.costs import data_parallel_share
from nostall.parallel.simulate.orders import caps
from nostall.parallel.simulate.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes per GPU of each worker.  ``fits`` None: a lower bound fits, nobody knows the rest."""

    state: tuple[float, ...]
    peak: tuple[float, ...]
    capacity: tuple[float, ...]
    measured: bool

    @property
    def fits(self) -> bool | None:
        """False is certain even from a lower bound; True needs measured stored bytes."""
        if any(p > c for p, c in zip(self.peak, self.capacity, strict=True)):
            return False
        return True if self.measured else None


def held_bytes(work: Workload, stage: Stage, recompute: bool, alone: bool) -> float:
    """Bytes per GPU that one micro-batch in flight keeps in a stage; ``alone``: the only stage.

    With re-computation only the stage's input stays.
    """
    r = len(stage.gpus)
    share = data_parallel_share(work, r) if alone else 1.0 / r
    whole = work.stored[stage.end] - work.stored[stage.first]
    return share * (work.cut[stage.first] if recompute else whole)


def working_bytes(work: Workload, stage: Stage, recompute: bool, alone: bool) -> float:
    """Bytes per GPU that a backward pass needs once: with re-computation, the stage's all."""
    return held_bytes(work, stage, False, alone) if recompute else 0.0


def state_bytes(work: Workload, stage: Stage) -> float:
    """Bytes per GPU of a stage's parameters, gradients and optimiser state."""
    return work.state_factor * (work.parameters[stage.end] - work.parameters[stage.first])


def fits_bound(work: Workload, plan: Plan) -> bool:
    """Whether the plan's memory stays below every GPU's, by the caps of its order.

    Quick, for planners; never says False for a plan that :func:`memory` lets pass, and for
    workers with one stage never True for one that it refuses.
    """
    used: dict[tuple[int, ...], float] = {}
    alone = len(plan.stages) == 1
    for stage, cap in zip(plan.stages, caps(plan, work.micro_batches), strict=True):
        cap = 1 if plan.interleaved or alone else cap
        used[stage.gpus] = (
            used.get(stage.gpus, 0.0)
            + state_bytes(work, stage)
            + cap * held_bytes(work, stage, plan.recompute, alone)
            + working_bytes(work, stage, plan.recompute, alone)
        )
    return all(size <= min(work.cluster.memory[g] for g in gpus) for gpus, size in used.items())


def memory(work: Workload, plan: Plan, timeline: Timeline) -> Memory:
    """Peak bytes over the simulated iteration, per worker."""
    workers = max(timeline.costs.worker) + 1
    state, peak = [0.0] * workers, [0.0] * workers
    capacity = [0.0] * workers
    for s, stage in enumerate(plan.stages):
        w = timeline.costs.worker[s]
        state[w] += state_bytes(work, stage)
        capacity[w] = min(work.cluster.memory[g] for g in stage.gpus)
    for w in range(workers):
        peak[w] = state[w] + float(course(work, plan, timeline, w)[1].max())
    return Memory(tuple(state), tuple(peak), tuple(capacity), work.profile.memory_measured)


def course(
    work: Workload, plan: Plan, timeline: Timeline, worker: int
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float64]], ...]:
    """Times and bytes of activations per GPU of a worker after each change, both (changes,)."""
    alone = len(plan.stages) == 1
    last = 2 if timeline.split else 1
    changes: list[tuple[float, float]] = [(0.0, 0.0)]
    for s, stage in enumerate(plan.stages):
        if timeline.costs.worker[s] != worker:
            continue
        size = held_bytes(work, stage, plan.recompute, alone)
        extra = working_bytes(work, stage, plan.recompute, alone)
        released = timeline.starts[last, s] + timeline.durations[last, s]
        held = list(zip(timeline.starts[0, s], released, strict=True))
        if alone:  # one local micro-batch at a time, however its share was cut into slices
            held = [(min(h[0] for h in held), max(h[1] for h in held))]
        for start, end in held:
            changes += [(float(start), size), (float(end), -size)]
        for start in timeline.starts[1, s] if extra else ():
            changes += [(float(start), extra), (float(start + timeline.durations[1, s]), -extra)]
    # What is released at the moment when something else begins makes room for it.
    changes.sort()
    times, sizes = np.array(changes).T
    return times, np.cumsum(sizes)
