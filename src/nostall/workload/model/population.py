"""Many jobs at once: shares and speed-ups as distributions, by job and by GPU time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from nostall.core.errors import BadJob
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job
from nostall.workload.model.breakdown import PARTS, Breakdown, step
from nostall.workload.model.projection import Projection, project
from nostall.workload.model.sweep import sensitivities


@dataclass(frozen=True)
class Series:
    """A weighted distribution: its values, sorted, and the weight at or below each (0 to 1)."""

    values: np.ndarray
    cumulative: np.ndarray

    @classmethod
    def of(cls, values: Sequence[float], weights: Sequence[float]) -> Series:
        order = np.argsort(np.asarray(values, dtype=np.float64), kind="stable")
        weight = np.asarray(weights, dtype=np.float64)[order]
        return cls(np.asarray(values)[order], np.cumsum(weight) / weight.sum())

    def at_most(self, value: float) -> float:
        """Weight of the values <= ``value``."""
        count = int(np.searchsorted(self.values, value, side="right"))
        return float(self.cumulative[count - 1]) if count else 0.0

    def quantile(self, share: float) -> float:
        """The smallest value with at least ``share`` of the weight at or below it."""
        at = int(np.searchsorted(self.cumulative, share - 1e-12))
        return float(self.values[min(at, len(self.values) - 1)])


@dataclass(frozen=True)
class Population:
    """Jobs on one hardware, modelled."""

    jobs: tuple[Job, ...]
    hardware: Hardware

    def __post_init__(self) -> None:
        if not self.jobs:
            raise BadJob("a population has no jobs; give at least one")

    @cached_property
    def steps(self) -> tuple[Breakdown, ...]:
        """The breakdown of each job."""
        return tuple(step(job, self.hardware) for job in self.jobs)

    def weights(self, by: str = "job") -> list[float]:
        """Weight of each job: 1 (``by="job"``), or its GPU time (``by="gpu"``).

        GPU time is ``gpu_hours`` where every job gives it, else replicas x step time: mixing the
        two would weight jobs in different units.
        """
        if by == "job":
            return [1.0] * len(self.jobs)
        given = [job.gpu_hours for job in self.jobs if job.gpu_hours is not None]
        if len(given) == len(self.jobs) and sum(given) > 0:
            return given
        return [j.replicas * s.total for j, s in zip(self.jobs, self.steps, strict=True)]

    def share(self, part: str, by: str = "job") -> float:
        """Mean share of one of :data:`PARTS` over the jobs."""
        weights = self.weights(by)
        shares = (s.share(part) for s in self.steps)
        return sum(s * w for s, w in zip(shares, weights, strict=True)) / sum(weights)

    def shares(self, by: str = "job") -> dict[str, float]:
        """Mean share of every part."""
        return {part: self.share(part, by) for part in PARTS}

    def cdf(self, of: Callable[[Breakdown], float], by: str = "job") -> Series:
        """Distribution of something that each breakdown gives."""
        return Series.of([of(s) for s in self.steps], self.weights(by))

    def select(self, *architectures: Architecture) -> Population | None:
        """The jobs of these architectures; None when there are none."""
        jobs = tuple(j for j in self.jobs if j.architecture in architectures)
        return Population(jobs, self.hardware) if jobs else None

    def project(self, target: Architecture) -> list[Projection]:
        """Every job ported to ``target``, whether it fits or not."""
        return [project(job, target, self.hardware) for job in self.jobs]

    def ranking(self, by: str = "job") -> dict[str, float]:
        """Mean removable share of each resource, the largest first: what to make faster."""
        weights = self.weights(by)
        found: dict[str, float] = {}
        for job, weight in zip(self.jobs, weights, strict=True):
            for one in sensitivities(job, self.hardware):
                name = one.resource.value
                found[name] = found.get(name, 0.0) + one.removable * weight / sum(weights)
        return dict(sorted(found.items(), key=lambda item: -item[1]))
