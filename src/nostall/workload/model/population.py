"""Modelled population of jobs: distributions of shares and speed-ups, by job and by GPU time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nostall.core.errors import BadJob
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job
from nostall.workload.model.breakdown import STEP_PARTS, StepBreakdown, model_step
from nostall.workload.model.projection import Projection, project_job
from nostall.workload.model.sensitivity import sensitivities


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
        """Mean removable share of each resource (:class:`Sensitivity`), the largest first."""
        weights = self.weights(by)
        means: dict[str, float] = {}
        for job, weight in zip(self.jobs, weights, strict=True):
            for sensitivity in sensitivities(job, self.hardware):
                name = sensitivity.resource.value
                share = sensitivity.removable_share * weight / sum(weights)
                means[name] = means.get(name, 0.0) + share
        return dict(sorted(means.items(), key=lambda item: -item[1]))
