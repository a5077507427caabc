"""Modelled memory of random plans against a count of what each worker holds at each moment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmarks.parallel.instances import LAYOUTS, random_chain, random_cluster
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.simulate import Timeline, memory, simulate
from nostall.parallel.simulate.costs import data_parallel_share
from nostall.parallel.simulate.memory import may_fit
from nostall.parallel.simulate.orders import in_flight_limits
from tests.property.test_parallel import plans


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[Workload, Plan]:
    """A random workload, and several stages on each of its GPUs in rotation."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    gpus, chunks = draw(st.integers(2, 3)), draw(st.integers(2, 3))
    profile = random_chain(gpus * chunks + draw(st.integers(0, 3)), rng)
    work = Workload(
        profile,
        random_cluster(gpus, draw(st.sampled_from(LAYOUTS)), rng),
        gpus * draw(st.integers(1, 4)),
    )
    cuts = rng.choice(np.arange(1, len(profile)), gpus * chunks - 1, replace=False)
    borders = [0, *sorted(cuts.tolist()), len(profile)]
    stages = tuple(Stage(borders[i], borders[i + 1], (i % gpus,)) for i in range(gpus * chunks))
    return work, Plan(stages, "interleaved", recompute=draw(st.booleans()))


def held_at(
    work: Workload, plan: Plan, timeline: Timeline, worker: int
) -> list[tuple[float, float, float]]:
    """(start, end, bytes per GPU) of all that a worker holds beside its state."""
    held = []
    last = 2 if timeline.splits_backward else 1
    for s, stage in enumerate(plan.stages):
        if timeline.costs.worker[s] != worker:
            continue
        gpus, is_alone = len(stage.gpus), len(plan.stages) == 1
        share = data_parallel_share(work, gpus) if is_alone else work.slice_share(gpus)
        layers = work.profile.layers[stage.first : stage.end]
        stored = share * sum(float(layer.stored_bytes or 0.0) for layer in layers)
        kept = share * work.cut_bytes[stage.first] if plan.recompute else stored
        starts = timeline.operation_starts[:, s]
        ends = starts + timeline.durations[:, s, None]
        if is_alone:  # its micro-batches follow one another
            held.append((starts[0].min(), ends[last].max(), kept))
        else:
            held += [(a, b, kept) for a, b in zip(starts[0], ends[last], strict=True)]
        if plan.recompute:
            held += [(a, b, stored) for a, b in zip(starts[1], ends[1], strict=True)]
    return held


@given(st.one_of(plans(), interleaved()))
@settings(max_examples=100, deadline=None)
def test_peaks_are_what_is_held_at_the_worst_moment(planned: tuple[Workload, Plan]) -> None:
    work, plan = planned
    timeline = simulate(work, plan)
    needed = memory(work, plan, timeline)
    for worker, (state, peak) in enumerate(zip(needed.state, needed.peak, strict=True)):
        own = [s for s in range(len(plan.stages)) if timeline.costs.worker[s] == worker]
        spans = [work.profile.layers[plan.stages[s].first : plan.stages[s].end] for s in own]
        parameters = sum(layer.parameter_bytes for span in spans for layer in span)
        assert state == pytest.approx(work.state_factor * parameters)
        held = held_at(work, plan, timeline, worker)
        moments = [sum(size for a, b, size in held if a <= t < b) for t, _, _ in held]
        assert peak - state == pytest.approx(max(moments), rel=1e-6)
        gpus = [g for s in own for g in plan.stages[s].gpus]
        assert needed.capacity[worker] == min(work.cluster.memory[g] for g in gpus)


@given(st.one_of(plans(), interleaved()), st.integers(0, 5), st.sampled_from((-1, 0, 1)))
@settings(max_examples=100, deadline=None)
def test_a_plan_fits_up_to_its_peak(planned: tuple[Workload, Plan], chosen: int, side: int) -> None:
    """One worker's GPUs have its peak, one byte less or one more; the others have enough."""
    work, plan = planned
    timeline = simulate(work, plan)
    needed = memory(work, plan, timeline)
    worker = chosen % len(needed.peak)
    workers = zip(plan.stages, timeline.costs.worker, strict=True)
    own = {g for stage, w in workers if w == worker for g in stage.gpus}
    peak = needed.peak[worker]
    size = peak if side == 0 else peak + side * max(1.0, peak * 1e-6)
    sizes = tuple(size if g in own else 1e15 for g in range(len(work.cluster)))
    work = replace(work, cluster=replace(work.cluster, memory=sizes))
    fits = memory(work, plan, timeline).fits
    assert fits is (side >= 0)
    reaches = plan.interleaved or _reaches_limits(plan, timeline, work)
    if fits and reaches:
        assert may_fit(work, plan) or side == 0  # sums in another order
    elif not fits and reaches and not plan.interleaved:
        assert not may_fit(work, plan)
    fitted = fit_to_memory(work, plan)
    if fitted is not None and not plan.interleaved:
        assert memory(work, fitted, simulate(work, fitted)).fits or side == 0


def _reaches_limits(plan: Plan, timeline: Timeline, work: Workload) -> bool:
    limits = in_flight_limits(plan, work.micro_batches)
    return len(plan.stages) == 1 or list(timeline.peak_in_flight) == limits
