"""Who holds which samples: nothing is lost, nothing is sent twice."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.program import program
from nostall.parallel.slices import Slices, shares
from tests.unit.parallel.cases import profile, servers


@given(st.integers(0, 50), st.integers(0, 60), st.integers(1, 9))
def test_shares_cover_and_differ_by_one(first: int, size: int, parts: int) -> None:
    found = shares(first, first + size, parts)
    assert [a for a, _ in found] == [first, *(b for _, b in found[:-1])]
    assert found[-1][1] == first + size
    sizes = [b - a for a, b in found]
    assert max(sizes) - min(sizes) <= 1


def plan_of(sizes: list[int]) -> tuple[Plan, int]:
    stages, gpu = [], 0
    for s, size in enumerate(sizes):
        stages.append(Stage(s, s + 1, tuple(range(gpu, gpu + size))))
        gpu += size
    return Plan(tuple(stages), "pb"), gpu


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=2, max_size=3), st.integers(1, 40), st.integers(1, 9))
def test_messages_hand_over_every_sample_once(
    sizes: list[int], samples: int, micro_batch: int
) -> None:
    plan, gpus = plan_of(sizes)
    work = Workload(profile(len(sizes)), servers(1, gpus), samples, micro_batch)
    slices = Slices(work, plan)
    seen = 0
    for m in range(slices.micro_batches):
        for boundary in range(len(sizes) - 1):
            messages = slices.messages(boundary, m)
            for target in range(sizes[boundary + 1]):
                got = [x for x in messages if x.target == target]
                first, end = slices.part(boundary + 1, target, m)
                assert [n for x in got for n in range(x.first, x.end)] == list(range(first, end))
                assert sum(x.whole for x in got) == (end > first)
            for x in messages:
                first, end = slices.part(boundary, x.source, m)
                assert first <= x.first < x.end <= end
        first, end = slices.part(0, 0, m)[0], slices.part(0, sizes[0] - 1, m)[1]
        seen += end - first
    assert seen == samples


def test_data_parallel_replicas_have_micro_batches_of_their_own() -> None:
    plan = Plan((Stage(0, 1, (0, 1)),), "1f1b")
    slices = Slices(Workload(profile(1), servers(1, 2), 9, 2), plan)
    parts = [[slices.part(0, r, m) for m in range(slices.micro_batches)] for r in (0, 1)]
    assert parts == [[(0, 1), (1, 2), (2, 4)], [(4, 5), (5, 7), (7, 9)]]


def test_operations_come_in_the_simulated_order() -> None:
    plan, gpus = plan_of([1, 1])
    work = Workload(profile(2), servers(1, gpus), 3)
    found = program(work, plan)
    assert [f"{o.kind}{o.micro_batch}" for o in found[(0,)]] == ["F0", "F1", "F2", "B0", "B1", "B2"]
    assert [f"{o.kind}{o.micro_batch}" for o in found[(1,)]] == ["F0", "B0", "F1", "B1", "F2", "B2"]
