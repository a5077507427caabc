"""Modelled effect of faster hardware: sweeps over the rate of a resource, and Amdahl bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Job, Resource
from nostall.workload.model.breakdown import StepBreakdown, model_step


@dataclass(frozen=True, slots=True)
class RateSweep:
    """Speed-up of each job at several rates of one resource."""

    resource: Resource
    rates: tuple[float, ...]
    speedups: tuple[tuple[float, ...], ...]
    """``speedups[i][j]``: job ``j`` at ``rates[i]``, relative to the unchanged hardware."""

    def mean_speedups(self, weights: Sequence[float] | None = None) -> list[float]:
        """Mean over the jobs at each rate; unweighted if ``weights`` is None."""
        weights = weights or [1.0] * len(self.speedups[0])
        total = sum(weights)
        return [
            sum(s * w for s, w in zip(row, weights, strict=True)) / total for row in self.speedups
        ]


def sweep_rate(
    jobs: Sequence[Job], hardware: Hardware, resource: Resource, rates: Sequence[float]
) -> RateSweep:
    """Model each job at each rate (FLOP/s or bytes/s) of one resource."""
    base = [model_step(job, hardware).total for job in jobs]
    rows = []
    for rate in rates:
        changed = hardware.with_rate(resource, rate)
        rows.append(
            tuple(b / model_step(j, changed).total for b, j in zip(base, jobs, strict=True))
        )
    return RateSweep(resource, tuple(rates), tuple(rows))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Dependence of a job's step time on the rate of one resource."""

    resource: Resource
    time_share: float
    """Share of the step that uses the resource."""
    removable_share: float
    """Share of the step that vanishes at an infinite rate; overheads remain."""

    def speedup(self, factor: float) -> float:
        """Amdahl's law: speed-up of the step if the rate grows by ``factor``."""
        return 1 / (1 - self.removable_share * (1 - 1 / factor))

    @property
    def max_speedup(self) -> float:
        """Speed-up of the step at an infinite rate."""
        return 1 / (1 - self.removable_share) if self.removable_share < 1 else math.inf


def sensitivities(job: Job, hardware: Hardware) -> list[Sensitivity]:
    """Sensitivity of a job to each resource, the largest removable share first."""
    step = model_step(job, hardware)
    unsorted = [
        Sensitivity(
            resource,
            step.resource_seconds(resource) / step.total,
            _removable_share(job, hardware, step, resource),
        )
        for resource in Resource
    ]
    return sorted(unsorted, key=lambda s: -s.removable_share)


def _removable_share(
    job: Job, hardware: Hardware, step: StepBreakdown, resource: Resource
) -> float:
    if step.resource_seconds(resource) == 0:
        return 0.0
    # The step time is linear in 1/rate, so doubling the rate removes half of the removable time.
    faster = model_step(job, hardware.scaled(resource, 2.0)).total
    return min(1.0, max(0.0, 2 * (step.total - faster) / step.total))
