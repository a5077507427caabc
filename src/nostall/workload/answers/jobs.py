"""What a population of jobs waits for, and what would change it; every number is modelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nostall.core.errors import BadHardware, BadJob
from nostall.workload.answers.whatif import WhatIf
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job, Resource
from nostall.workload.jobs.table import JobTable
from nostall.workload.model.breakdown import PARTS, Breakdown, step
from nostall.workload.model.population import Population, Series
from nostall.workload.model.projection import Projection
from nostall.workload.model.sweep import Sweep, sweep

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Multiples of each rate in the sensitivity curves."""
TARGETS = (
    Architecture.ALLREDUCE_LOCAL,
    Architecture.ALLREDUCE_CLUSTER,
    Architecture.PEARL,
)


@dataclass(frozen=True)
class Group:
    """Jobs of one architecture, or all: mean shares of a step, and the gain of perfect overlap."""

    name: str
    jobs: int
    gpu_time: float
    by_job: dict[str, float]
    by_gpu: dict[str, float]
    overlap_gain: float


@dataclass(frozen=True)
class Ported:
    """PS/Worker jobs ported to another architecture; speed-ups of the whole job's throughput."""

    target: str
    jobs: int
    fitting: int
    faster: float
    faster_per_replica: float
    mean_speedup: float
    median_speedup: float


@dataclass(frozen=True)
class Changed:
    """A what-if: mean speed-up by job and by GPU time, over the jobs it applies to."""

    question: str
    jobs: int
    mean_by_job: float
    mean_by_gpu: float


@dataclass(frozen=True)
class JobsAnswer:
    """Everything that is said of a population."""

    population: Population
    groups: tuple[Group, ...]
    ranking: dict[str, float]
    ported: tuple[Ported, ...]
    changed: tuple[Changed, ...]
    sweeps: tuple[Sweep, ...]
    left_out: tuple[str, ...]
    skipped: int
    unread: int

    def as_json(self) -> dict[str, Any]:
        """Plain data, without the curves."""
        return {
            "kind": "modelled",
            "hardware": self.population.hardware.name,
            "jobs": len(self.population.jobs),
            "left_out": self.skipped,
            "unreadable_files": self.unread,
            "reasons": list(self.left_out),
            "groups": [asdict(g) for g in self.groups],
            "ranking_by_gpu_time": self.ranking,
            "ported_from_ps_worker": [asdict(p) for p in self.ported],
            "what_if": [asdict(c) for c in self.changed],
            "per_job": [_one(job, found) for job, found in self.largest()],
        }

    def largest(self, most: int | None = None) -> list[tuple[Job, Breakdown]]:
        """Jobs with their steps, those with the most GPU time first."""
        rows = zip(
            self.population.weights("gpu"), self.population.jobs, self.population.steps, strict=True
        )
        ordered = sorted(rows, key=lambda row: -row[0])
        return [(job, found) for _, job, found in ordered[:most]]


def _one(job: Job, found: Breakdown) -> dict[str, Any]:
    return {
        "name": job.name,
        "architecture": job.architecture.value,
        "seconds": {part: found.part(part) for part in PARTS},
        "total": found.total,
        "perfect_overlap": found.overlapped,
    }


def answer_jobs(
    tables: Sequence[JobTable],
    hardware: Hardware,
    questions: Sequence[WhatIf] = (),
    unread: Sequence[str] = (),
) -> JobsAnswer:
    """Breakdown, ranking, projections and what-ifs of all jobs of the tables.

    A job that this hardware cannot run (a link or a precision is missing) is left out and said;
    ``unread`` says why whole files were.
    """
    jobs, left_out, skipped = _runnable(tables, hardware)
    everything = Population(tuple(jobs), hardware)
    weights = everything.weights("gpu")
    groups = [_group("all", everything, 1.0)]
    for architecture in Architecture:
        if (some := everything.select(architecture)) is not None:
            own = (w for w, j in zip(weights, jobs, strict=True) if j.architecture is architecture)
            groups.append(_group(architecture.value, some, sum(own) / sum(weights)))
    present = [r for r in Resource if r is Resource.COMPUTE or hardware.rate(r) > 0]
    return JobsAnswer(
        population=everything,
        groups=tuple(groups),
        ranking=everything.ranking("gpu"),
        ported=tuple(_ported(everything)),
        changed=tuple(_changed(everything, q) for q in questions),
        sweeps=tuple(_curve(jobs, hardware, r) for r in present),
        left_out=(*unread, *left_out),
        skipped=skipped,
        unread=len(unread),
    )


def _runnable(tables: Sequence[JobTable], hardware: Hardware) -> tuple[list[Job], list[str], int]:
    jobs: list[Job] = []
    left_out = [f"{t.path}: {row.where}: {row.reason}" for t in tables for row in t.left_out]
    skipped = sum(t.skipped for t in tables)
    for job in (job for table in tables for job in table.jobs):
        try:
            step(job, hardware)
        except BadHardware as error:
            left_out.append(f"job {job.name!r}: {error}")
            skipped += 1
        else:
            jobs.append(job)
    if not jobs:
        raise BadJob(f"no job can run on {hardware.name}: {left_out[-1]}")
    return jobs, left_out, skipped


def _group(name: str, some: Population, gpu_time: float) -> Group:
    weights = some.weights("gpu")
    gains = [s.total / s.overlapped for s in some.steps]
    return Group(
        name=name,
        jobs=len(some.jobs),
        gpu_time=gpu_time,
        by_job=some.shares("job"),
        by_gpu=some.shares("gpu"),
        overlap_gain=sum(g * w for g, w in zip(gains, weights, strict=True)) / sum(weights),
    )


def _ported(everything: Population) -> list[Ported]:
    workers = everything.select(Architecture.PS_WORKER)
    if workers is None:
        return []
    found = []
    for target in TARGETS:
        try:
            projections = workers.project(target)
        except BadHardware:
            continue  # without NVLink there is nothing to port to
        found.append(_summed(target, projections))
    return found


def _summed(target: Architecture, projections: Sequence[Projection]) -> Ported:
    count = len(projections)
    fitting = [p for p in projections if not p.obstacle]
    gains = Series.of([p.throughput for p in projections], [1.0] * count)
    return Ported(
        target=target.value,
        jobs=count,
        fitting=len(fitting),
        faster=sum(p.throughput > 1 for p in fitting) / count,
        faster_per_replica=sum(p.per_replica > 1 for p in fitting) / count,
        mean_speedup=float(gains.values.mean()),
        median_speedup=gains.quantile(0.5),
    )


def _changed(everything: Population, question: WhatIf) -> Changed:
    if question.target is not None:
        others = [a for a in Architecture if a not in (question.target, Architecture.SINGLE)]
        some = everything.select(*others)
        if some is None:
            raise BadJob(f"--what-if {question.text}: no job has another architecture")
        speedups = [p.throughput for p in some.project(question.target)]
    else:
        some = everything
        new = question.changed(everything.hardware)
        after = [step(job, new).total for job in some.jobs]
        speedups = [s.total / t for s, t in zip(some.steps, after, strict=True)]
    weights = some.weights("gpu")
    by_gpu = sum(s * w for s, w in zip(speedups, weights, strict=True)) / sum(weights)
    return Changed(question.text, len(speedups), sum(speedups) / len(speedups), by_gpu)


def _curve(jobs: Sequence[Job], hardware: Hardware, resource: Resource) -> Sweep:
    if resource is not Resource.COMPUTE:
        rate = hardware.rate(resource)
        return sweep(jobs, hardware, resource, [rate * f for f in FACTORS])
    # Precisions have different peaks, so that compute is swept in multiples of each.
    base = [step(job, hardware).total for job in jobs]
    rows = [
        tuple(
            b / step(j, hardware.scaled(resource, f)).total for b, j in zip(base, jobs, strict=True)
        )
        for f in FACTORS
    ]
    unit = sweep(jobs[:1], hardware, resource, [1.0])
    return replace(unit, rates=FACTORS, speedups=tuple(rows))
