"""Modelled what-ifs of one job (projection, sensitivity), and the population of many jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from nostall.core.errors import BadJob
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job, Resource
from nostall.workload.model.breakdown import STEP_PARTS, StepBreakdown, model_step


@dataclass(frozen=True, slots=True)
class Projection:
    """A job before and after porting, with its modelled steps."""

    before: Job
    after: Job
    step_before: StepBreakdown
    step_after: StepBreakdown
    obstacle: str
    """Why the ported job cannot run; empty if it can.  The speed-ups ignore the obstacle."""

    @property
    def replica_speedup(self) -> float:
        """Step time of one replica before over after."""
        return self.step_before.total / self.step_after.total

    @property
    def throughput_speedup(self) -> float:
        """Throughput of all replicas after over before.

        Less than :attr:`replica_speedup` if porting reduces the number of replicas.
        """
        return self.replica_speedup * self.after.replicas / self.before.replicas


def project_job(job: Job, target: Architecture, hardware: Hardware) -> Projection:
    """Port ``job`` to ``target``; a single-server target caps the replicas at its GPUs.

    Raises :class:`~nostall.core.errors.BadJob` for 1w1g, which would only drop replicas.
    """
    if target is Architecture.SINGLE:
        raise BadJob(
            f"job {job.name!r} cannot be projected to 1w1g; use one of "
            f"{', '.join(a for a in Architecture if a is not Architecture.SINGLE)}"
        )
    gpus = hardware.gpus_per_server
    replicas = min(job.replicas, gpus) if target.is_single_server else job.replicas
    after = replace(job, architecture=target, replicas=replicas)
    return Projection(
        before=job,
        after=after,
        step_before=model_step(job, hardware),
        step_after=model_step(after, hardware),
        obstacle=_obstacle(after, hardware),
    )


def _obstacle(job: Job, hardware: Hardware) -> str:
    """The reason if the weights do not fit a GPU; activations and optimiser state are unknown."""
    size = weight_bytes_per_gpu(job)
    if size <= hardware.memory_size:
        return ""
    return (
        f"weights need {size / 1e9:.3g} GB on each GPU, {hardware.name} has "
        f"{hardware.memory_size / 1e9:.3g} GB"
    )


def weight_bytes_per_gpu(job: Job) -> float:
    """Bytes of weights that one GPU stores under the job's architecture."""
    match job.architecture:
        case Architecture.MULTI_GPU | Architecture.PS_WORKER:
            return job.dense_bytes + job.touched_bytes
        case Architecture.PEARL:
            return job.dense_bytes + job.embedding_bytes / job.replicas
        case _:
            return job.dense_bytes + job.embedding_bytes


@dataclass(frozen=True, slots=True)
class RateSweep:
    """Speed-up of each job at several rates of one resource."""

    resource: Resource
    speedups: tuple[tuple[float, ...], ...]
    """``speedups[i][j]``: job ``j`` at rate ``i``, relative to the unchanged hardware."""

    def mean_speedups(self, weights: Sequence[float] | None = None) -> list[float]:
        """Mean over the jobs at each rate; unweighted if ``weights`` is None."""
        weights = weights or [1.0] * len(self.speedups[0])
        total = sum(weights)
        return [
            sum(s * w for s, w in zip(row, weights, strict=True)) / total for row in self.speedups
        ]


def sweep_rate(
    jobs: Sequence[Job], hardware: Hardware, resource: Resource, factors: Sequence[float]
) -> RateSweep:
    """Model each job with the rate of one resource multiplied by each factor."""
    base = [model_step(job, hardware).total for job in jobs]
    rows = []
    for factor in factors:
        changed = hardware.scaled(resource, factor)
        rows.append(
            tuple(b / model_step(j, changed).total for b, j in zip(base, jobs, strict=True))
        )
    return RateSweep(resource, tuple(rows))


def removable_shares(job: Job, hardware: Hardware) -> dict[Resource, float]:
    """Share of a job's step that vanishes at an infinite rate of each resource, the largest first.

    Overheads remain.
    """
    step = model_step(job, hardware)
    shares = dict.fromkeys(Resource, 0.0)
    for resource in Resource:
        if step.resource_seconds(resource) > 0:
            # The step time is linear in 1/rate: doubling the rate removes half of what vanishes.
            faster = model_step(job, hardware.scaled(resource, 2.0)).total
            shares[resource] = min(1.0, max(0.0, 2 * (step.total - faster) / step.total))
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class WeightedDistribution:
    """Cumulative distribution of weighted values."""

    values: np.ndarray
    """Ascending, shape [values]."""
    cumulative: np.ndarray
    """Share of the weight at or below each value, 0 to 1, shape [values]."""

    @classmethod
    def from_values(cls, values: Sequence[float], weights: Sequence[float]) -> WeightedDistribution:
        order = np.argsort(np.asarray(values, dtype=np.float64), kind="stable")
        weight = np.asarray(weights, dtype=np.float64)[order]
        return cls(np.asarray(values)[order], np.cumsum(weight) / weight.sum())

    def quantile(self, share: float) -> float:
        """The smallest value with at least ``share`` of the weight at or below it."""
        index = int(np.searchsorted(self.cumulative, share - 1e-12))
        return float(self.values[min(index, len(self.values) - 1)])


@dataclass(frozen=True)
class Population:
    """Jobs modelled on one hardware.  Means and distributions weight jobs ``by`` "job" or "gpu"."""

    jobs: tuple[Job, ...]
    hardware: Hardware

    def __post_init__(self) -> None:
        if not self.jobs:
            raise BadJob("a population has no jobs; give at least one job")

    @cached_property
    def steps(self) -> tuple[StepBreakdown, ...]:
        """The modelled step of each job."""
        return tuple(model_step(job, self.hardware) for job in self.jobs)

    def weights(self, by: str = "job") -> list[float]:
        """Weight of each job: 1 (``by="job"``), or its GPU time (``by="gpu"``).

        GPU time is ``gpu_hours`` if every job has it, else replicas x step time.  The two have
        different units, so they are never mixed.
        """
        if by == "job":
            return [1.0] * len(self.jobs)
        gpu_hours = [job.gpu_hours for job in self.jobs if job.gpu_hours is not None]
        if len(gpu_hours) == len(self.jobs) and sum(gpu_hours) > 0:
            return gpu_hours
        return [j.replicas * s.total for j, s in zip(self.jobs, self.steps, strict=True)]

    def mean_share(self, part: str, by: str = "job") -> float:
        """Mean share of one of :data:`STEP_PARTS` over the jobs."""
        weights = self.weights(by)
        shares = (s.share(part) for s in self.steps)
        return sum(s * w for s, w in zip(shares, weights, strict=True)) / sum(weights)

    def mean_shares(self, by: str = "job") -> dict[str, float]:
        """Mean share of each of :data:`STEP_PARTS` over the jobs."""
        return {part: self.mean_share(part, by) for part in STEP_PARTS}

    def distribution(
        self, value: Callable[[StepBreakdown], float], by: str = "job"
    ) -> WeightedDistribution:
        """Distribution of ``value`` of the modelled steps."""
        return WeightedDistribution.from_values([value(s) for s in self.steps], self.weights(by))

    def select(self, *architectures: Architecture) -> Population | None:
        """The jobs with one of these architectures; None if there are none."""
        jobs = tuple(j for j in self.jobs if j.architecture in architectures)
        return Population(jobs, self.hardware) if jobs else None

    def project(self, target: Architecture) -> list[Projection]:
        """Each job ported to ``target``, even if its weights do not fit a GPU."""
        return [project_job(job, target, self.hardware) for job in self.jobs]

    def resource_ranking(self, by: str = "job") -> dict[str, float]:
        """Mean of :func:`removable_shares` over the jobs by resource, the largest first."""
        weights = self.weights(by)
        means: dict[str, float] = {}
        for job, weight in zip(self.jobs, weights, strict=True):
            for resource, share in removable_shares(job, self.hardware).items():
                mean = means.get(resource.value, 0.0) + share * weight / sum(weights)
                means[resource.value] = mean
        return dict(sorted(means.items(), key=lambda item: -item[1]))
