"""The example table is read and modelled; its values are unverified, so none is asserted."""

from __future__ import annotations

from pathlib import Path

from nostall.workload import Architecture, Population, load_hardware, read_jobs

SHAPES = Path(__file__).parents[3] / "examples" / "workload" / "case_studies.csv"


def test_the_six_shapes_are_modelled_and_marked_unverified() -> None:
    table = read_jobs(SHAPES)
    assert len(table.jobs) == 6
    assert table.skipped == 0
    assert all("(unverified)" in job.name for job in table.jobs)
    population = Population(table.jobs, load_hardware("pai-2018"))
    for job, step in zip(table.jobs, population.steps, strict=True):
        assert 0 < step.overlapped <= step.total
        assert (step.weights == 0) == (job.architecture is Architecture.SINGLE)
