"""Slices of micro-batches: each sample is computed and sent exactly once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.rank_schedule import rank_schedules
from nostall.parallel.slices import Slices, split_evenly
from tests.unit.parallel.cases import profile, servers


@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 9))
def test_even_parts_cover_the_range_and_differ_by_one(first: int, size: int, parts: int) -> None:
    ranges = split_evenly(first, first + size, parts)
    assert [a for a, _ in ranges] == [first, *(b for _, b in ranges[:-1])]
    assert ranges[-1][1] == first + size
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1


def plan_with(sizes: list[int]) -> tuple[Plan, int]:
    """A plan with the given numbers of replicas, and its number of GPUs."""
    stages, gpu = [], 0
    for s, size in enumerate(sizes):
        stages.append(Stage(s, s + 1, tuple(range(gpu, gpu + size))))
        gpu += size
    return Plan(tuple(stages), "pb"), gpu


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(1, 40), st.integers(1, 9))
def test_messages_send_each_sample_once(sizes: list[int], samples: int, micro_batch: int) -> None:
    plan, gpus = plan_with(sizes)
    work = Workload(profile(len(sizes)), servers(1, gpus), samples, micro_batch)
    slices = Slices(work, plan)
    computed = 0
    for m in range(slices.micro_batches):
        for boundary in range(len(sizes) - 1):
            messages = slices.messages(boundary, m)
            for target in range(sizes[boundary + 1]):
                received = [x for x in messages if x.target == target]
                first, end = slices.samples(boundary + 1, target, m)
                assert [n for x in received for n in range(x.first, x.end)] == list(
                    range(first, end)
                )
                assert sum(x.carries_unbatched for x in received) == (end > first)
            for x in messages:
                first, end = slices.samples(boundary, x.source, m)
                assert first <= x.first < x.end <= end
        first, end = slices.samples(0, 0, m)[0], slices.samples(0, sizes[0] - 1, m)[1]
        computed += end - first
    assert computed == samples


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 9))
def test_modelled_shares_are_those_of_the_busiest_replica(
    samples: int, micro_batch: int, replicas: int
) -> None:
    plan, gpus = plan_with([replicas, 1])
    work = Workload(profile(2), servers(1, gpus), samples, micro_batch)
    slices = Slices(work, plan)
    most = [
        max(end - first for first, end in (slices.samples(0, r, m) for r in range(replicas)))
        for m in range(slices.micro_batches)
    ]
    assert work.slice_share(replicas) == pytest.approx(sum(most) / samples)
    alone = Slices(work, Plan((Stage(0, 2, tuple(range(replicas))),), "1f1b"))
    sizes = [
        sum(b - a for a, b in (alone.samples(0, r, m) for m in range(alone.micro_batches)))
        for r in range(replicas)
    ]
    assert work.data_parallel_share(replicas) == pytest.approx(max(sizes) / samples)


def test_fractions_of_samples_divide_evenly() -> None:
    work = Workload(profile(2), servers(1, 4), 8, 2, fractions=True)
    assert work.slice_share(4) == work.data_parallel_share(4) == 0.25


def test_data_parallel_replicas_split_their_own_shares() -> None:
    plan = Plan((Stage(0, 1, (0, 1)),), "1f1b")
    slices = Slices(Workload(profile(1), servers(1, 2), 9, 2), plan)
    parts = [[slices.samples(0, r, m) for m in range(slices.micro_batches)] for r in (0, 1)]
    assert parts == [[(0, 1), (1, 2), (2, 4)], [(4, 5), (5, 7), (7, 9)]]


def test_operations_have_the_simulated_order() -> None:
    plan, gpus = plan_with([1, 1])
    work = Workload(profile(2), servers(1, gpus), 3)
    schedules = rank_schedules(work, plan)
    assert [f"{o.kind}{o.micro_batch}" for o in schedules[(0,)]] == [
        "F0",
        "F1",
        "F2",
        "B0",
        "B1",
        "B2",
    ]
    assert [f"{o.kind}{o.micro_batch}" for o in schedules[(1,)]] == [
        "F0",
        "B0",
        "F1",
        "B1",
        "F2",
        "B2",
    ]
