"""Characterisation of a population of jobs; all numbers are modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nostall.core.errors import BadHardware, BadInput, BadJob
from nostall.workload.characterization.what_if import WhatIf
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job, Resource
from nostall.workload.jobs.table import JobTable
from nostall.workload.model.breakdown import STEP_PARTS, StepBreakdown, model_step
from nostall.workload.model.population import (
    Population,
    Projection,
    RateSweep,
    WeightedDistribution,
    sweep_rate,
)

RATE_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Factors of each rate in the sweeps."""
PORTING_TARGETS = (
    Architecture.ALLREDUCE_LOCAL,
    Architecture.ALLREDUCE_CLUSTER,
    Architecture.PEARL,
)


# The field names of the next three classes are keys of the JSON output.


@dataclass(frozen=True)
class JobGroup:
    """The jobs of one architecture, or all jobs."""

    name: str
    jobs: int
    """Number of jobs."""
    gpu_time: float
    """Share of the GPU time of all jobs."""
    by_job: dict[str, float]
    """Mean share of each part of the step; each job has the same weight."""
    by_gpu: dict[str, float]
    """Mean share of each part of the step, weighted by GPU time."""
    overlap_gain: float
    """Mean speed-up, weighted by GPU time, if input, GPU work and weight traffic overlapped
    perfectly."""


@dataclass(frozen=True)
class PortingSummary:
    """PS/Worker jobs ported to another architecture."""

    target: str
    jobs: int
    """Number of PS/Worker jobs."""
    fitting: int
    """Number of jobs whose weights fit the GPUs."""
    faster: float
    """Share of the jobs that fit and have a higher throughput."""
    faster_per_replica: float
    """Share of the jobs that fit and have a shorter step."""
    mean_speedup: float
    """Mean speed-up of the throughput of all replicas, over all jobs."""
    median_speedup: float


@dataclass(frozen=True)
class WhatIfResult:
    """Mean speed-up that a what-if question gives the jobs that it applies to."""

    question: str
    jobs: int
    """Number of jobs that the question applies to."""
    mean_by_job: float
    mean_by_gpu: float
    """Mean weighted by GPU time."""


@dataclass(frozen=True)
class JobsCharacterization:
    """The modelled result for a population of jobs."""

    population: Population
    groups: tuple[JobGroup, ...]
    """All jobs first, then one group per architecture."""
    resource_ranking: dict[str, float]
    """Removable share of GPU time of each resource, the largest first."""
    porting: tuple[PortingSummary, ...]
    what_if: tuple[WhatIfResult, ...]
    sweeps: tuple[RateSweep, ...]
    skip_reasons: tuple[str, ...]
    """Reasons for unreadable files, skipped rows and skipped jobs."""
    num_skipped: int
    """Number of skipped rows and jobs."""
    num_unreadable: int
    """Number of unreadable files."""
    notes: tuple[str, ...] = ()
    """Damage in rows that are used."""

    def as_json(self) -> dict[str, Any]:
        """The JSON output of the command; it has no sweeps."""
        return {
            "kind": "modelled",
            "hardware": self.population.hardware.name,
            "jobs": len(self.population.jobs),
            "left_out": self.num_skipped,
            "unreadable_files": self.num_unreadable,
            "reasons": list(self.skip_reasons),
            "remarks": list(self.notes),
            "groups": [asdict(group) for group in self.groups],
            "ranking_by_gpu_time": self.resource_ranking,
            "ported_from_ps_worker": [asdict(summary) for summary in self.porting],
            "what_if": [asdict(result) for result in self.what_if],
            "per_job": [_job_json(job, step) for job, step in self.largest_jobs()],
        }

    def largest_jobs(self, limit: int | None = None) -> list[tuple[Job, StepBreakdown]]:
        """Jobs with their modelled steps, by descending GPU time."""
        rows = zip(
            self.population.weights("gpu"), self.population.jobs, self.population.steps, strict=True
        )
        ordered = sorted(rows, key=lambda row: -row[0])
        return [(job, step) for _, job, step in ordered[:limit]]


def _job_json(job: Job, step: StepBreakdown) -> dict[str, Any]:
    return {
        "name": job.name,
        "architecture": job.architecture.value,
        "seconds": {part: step.part(part) for part in STEP_PARTS},
        "total": step.total,
        "perfect_overlap": step.overlapped,
    }


def characterize_jobs(
    tables: Sequence[JobTable],
    hardware: Hardware,
    questions: Sequence[WhatIf] = (),
    unreadable: Sequence[str] = (),
) -> JobsCharacterization:
    """Model all jobs of the tables on ``hardware``.

    Jobs that need a link or a precision that the hardware lacks are skipped.  ``unreadable`` are
    the reasons for files that could not be read.
    """
    jobs, skip_reasons, num_skipped = _runnable_jobs(tables, hardware)
    population = Population(tuple(jobs), hardware)
    weights = population.weights("gpu")
    groups = [_group("all", population, 1.0)]
    for architecture in Architecture:
        if (selected := population.select(architecture)) is not None:
            gpu_times = (
                w for w, j in zip(weights, jobs, strict=True) if j.architecture is architecture
            )
            groups.append(_group(architecture.value, selected, sum(gpu_times) / sum(weights)))
    existing = [r for r in Resource if r is Resource.COMPUTE or hardware.rate(r) > 0]
    return JobsCharacterization(
        population=population,
        groups=tuple(groups),
        resource_ranking=population.resource_ranking("gpu"),
        porting=tuple(_porting(population)),
        what_if=tuple(_what_if(population, question) for question in questions),
        sweeps=tuple(sweep_rate(jobs, hardware, r, RATE_FACTORS) for r in existing),
        skip_reasons=(*unreadable, *skip_reasons),
        num_skipped=num_skipped,
        num_unreadable=len(unreadable),
        notes=tuple(f"{table.path}: {note}" for table in tables for note in table.notes),
    )


def _runnable_jobs(
    tables: Sequence[JobTable], hardware: Hardware
) -> tuple[list[Job], list[str], int]:
    """(jobs that the hardware can run, reasons for skipped rows and jobs, number of those)."""
    jobs: list[Job] = []
    skip_reasons = [
        f"{table.path}: {row.position}: {row.reason}"
        for table in tables
        for row in table.skipped_rows
    ]
    num_skipped = sum(table.num_skipped for table in tables)
    for job in (job for table in tables for job in table.jobs):
        try:
            model_step(job, hardware)
        except BadHardware as error:
            skip_reasons.append(f"job {job.name!r}: {error}")
            num_skipped += 1
        else:
            jobs.append(job)
    if not jobs:
        raise BadJob(
            f"no job can run on {hardware.name}; the last reason: {skip_reasons[-1]}; give other "
            "jobs or other hardware"
        )
    return jobs, skip_reasons, num_skipped


def _group(name: str, population: Population, gpu_time: float) -> JobGroup:
    weights = population.weights("gpu")
    gains = [s.total / s.overlapped for s in population.steps]
    return JobGroup(
        name=name,
        jobs=len(population.jobs),
        gpu_time=gpu_time,
        by_job=population.mean_shares("job"),
        by_gpu=population.mean_shares("gpu"),
        overlap_gain=sum(g * w for g, w in zip(gains, weights, strict=True)) / sum(weights),
    )


def _porting(population: Population) -> list[PortingSummary]:
    ps_workers = population.select(Architecture.PS_WORKER)
    if ps_workers is None:
        return []
    summaries = []
    for target in PORTING_TARGETS:
        try:
            projections = ps_workers.project(target)
        except BadHardware:
            continue  # the hardware lacks a link of the target
        summaries.append(_porting_summary(target, projections))
    return summaries


def _porting_summary(target: Architecture, projections: Sequence[Projection]) -> PortingSummary:
    count = len(projections)
    fitting = [p for p in projections if not p.obstacle]
    speedups = WeightedDistribution.from_values(
        [p.throughput_speedup for p in projections], [1.0] * count
    )
    return PortingSummary(
        target=target.value,
        jobs=count,
        fitting=len(fitting),
        faster=sum(p.throughput_speedup > 1 for p in fitting) / count,
        faster_per_replica=sum(p.replica_speedup > 1 for p in fitting) / count,
        mean_speedup=float(speedups.values.mean()),
        median_speedup=speedups.quantile(0.5),
    )


def _what_if(population: Population, question: WhatIf) -> WhatIfResult:
    if question.nodes is not None:
        raise BadInput(
            f"--what-if {question.text}: the jobs of a job table have replicas, not nodes; ask "
            "for to=allreduce-cluster, or give a table of measured steps or a trace"
        )
    if question.target is not None:
        sources = [a for a in Architecture if a not in (question.target, Architecture.SINGLE)]
        affected = population.select(*sources)
        if affected is None:
            raise BadJob(
                f"--what-if {question.text}: all jobs are {question.target} or 1w1g already; ask "
                "for another architecture"
            )
        speedups = [p.throughput_speedup for p in affected.project(question.target)]
    else:
        affected = population
        hardware = question.apply(population.hardware)
        totals = [model_step(job, hardware).total for job in affected.jobs]
        speedups = [s.total / total for s, total in zip(affected.steps, totals, strict=True)]
    weights = affected.weights("gpu")
    mean_by_gpu = sum(s * w for s, w in zip(speedups, weights, strict=True)) / sum(weights)
    mean_by_job = sum(speedups) / len(speedups)
    return WhatIfResult(question.text, len(speedups), mean_by_job, mean_by_gpu)
