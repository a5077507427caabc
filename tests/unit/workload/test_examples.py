"""The example job table can be read and modelled; its values are unverified and not asserted."""

from __future__ import annotations

from pathlib import Path

from nostall.workload import Architecture, Population, load_hardware, read_jobs

CASE_STUDIES = Path(__file__).parents[3] / "examples" / "workload" / "case_studies.csv"


def test_the_six_jobs_are_modelled_and_marked_unverified() -> None:
    table = read_jobs(CASE_STUDIES)
    assert len(table.jobs) == 6
    assert table.num_skipped == 0
    assert all("(unverified)" in job.name for job in table.jobs)
    population = Population(table.jobs, load_hardware("pai-2018"))
    for job, step in zip(table.jobs, population.steps, strict=True):
        assert 0 < step.overlapped <= step.total
        assert (step.weights == 0) == (job.architecture is Architecture.SINGLE)
