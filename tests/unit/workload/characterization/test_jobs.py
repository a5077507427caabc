"""Characterisation of populations of jobs: shares, weights and gains, computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.workload import Architecture, Job, Resource
from nostall.workload.characterization.jobs import JobGroup, characterize_jobs
from nostall.workload.characterization.what_if import parse_what_if
from nostall.workload.jobs.table import JobTable
from nostall.workload.model.breakdown import model_step
from tests.unit.workload.job_records import TEST_HARDWARE, make_job

# The second job's step is all arithmetic, so that overlap gains it nothing.
BALANCED = make_job(gpu_hours=1.0)
ARITHMETIC = make_job(
    Architecture.SINGLE,
    memory_bytes=0,
    input_bytes=0,
    dense_bytes=0,
    embedding_bytes=0,
    touched_bytes=0,
    gpu_hours=3.0,
)


def _groups(*jobs: Job) -> dict[str, JobGroup]:
    table = JobTable(Path("table.csv"), jobs, (), 0)
    return {group.name: group for group in characterize_jobs([table], TEST_HARDWARE).groups}


def test_gains_and_shares_are_weighted_by_gpu_time() -> None:
    step = model_step(BALANCED, TEST_HARDWARE)
    gain = step.total / max(step.data, step.compute + step.memory, step.weights)
    assert gain > 1.2
    groups = _groups(BALANCED, ARITHMETIC)
    assert groups["all"].overlap_gain == pytest.approx((1 * gain + 3 * 1) / 4)
    assert groups["all"].by_gpu["compute"] == pytest.approx((step.compute / step.total + 3) / 4)
    assert groups["all"].by_job["compute"] == pytest.approx((step.compute / step.total + 1) / 2)
    assert groups["all"].gpu_time == 1.0
    own = groups[BALANCED.architecture.value]
    assert (own.jobs, own.gpu_time) == (1, 0.25)
    assert own.overlap_gain == pytest.approx(gain)
    assert groups[Architecture.SINGLE.value].overlap_gain == pytest.approx(1.0)


@pytest.mark.parametrize("jobs", [(BALANCED,), (BALANCED, ARITHMETIC), (ARITHMETIC,)])
def test_the_shares_of_a_group_sum_to_one(jobs: tuple[Job, ...]) -> None:
    for group in _groups(*jobs).values():
        assert sum(group.by_job.values()) == pytest.approx(1)
        assert sum(group.by_gpu.values()) == pytest.approx(1)


def test_a_question_is_answered_by_job_and_by_gpu_time() -> None:
    table = JobTable(Path("table.csv"), (BALANCED, ARITHMETIC), (), 0)
    faster = parse_what_if("compute=x2")
    (answer,) = characterize_jobs([table], TEST_HARDWARE, [faster]).what_if
    step = model_step(BALANCED, TEST_HARDWARE)
    speedup = step.total / (step.total - step.compute / 2)
    assert answer.jobs == 2
    assert answer.mean_by_job == pytest.approx((speedup + 2) / 2)
    assert answer.mean_by_gpu == pytest.approx((speedup + 3 * 2) / 4)


def test_the_ranking_starts_with_the_resource_of_the_longest_jobs() -> None:
    table = JobTable(Path("table.csv"), (BALANCED, ARITHMETIC), (), 0)
    ranking = characterize_jobs([table], TEST_HARDWARE).resource_ranking
    assert next(iter(ranking)) == Resource.COMPUTE.value
    assert list(ranking.values()) == sorted(ranking.values(), reverse=True)
