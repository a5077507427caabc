"""What faster hardware would change: sweeps over one rate, and which rate matters most."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Job, Resource
from nostall.workload.model.breakdown import Breakdown, step


@dataclass(frozen=True, slots=True)
class Sweep:
    """Speed-ups of each job at each rate of one resource, relative to the hardware as it is.

    ``speedups[v][j]``: of job ``j`` at ``rates[v]``.
    """

    resource: Resource
    rates: tuple[float, ...]
    speedups: tuple[tuple[float, ...], ...]

    def mean(self, weights: Sequence[float] | None = None) -> list[float]:
        """Mean speed-up over the jobs at each rate; weighted where weights are given."""
        use = weights or [1.0] * len(self.speedups[0])
        total = sum(use)
        return [sum(s * w for s, w in zip(row, use, strict=True)) / total for row in self.speedups]


def sweep(
    jobs: Sequence[Job], hardware: Hardware, resource: Resource, rates: Sequence[float]
) -> Sweep:
    """Model every job at every rate (per second) of one resource."""
    base = [step(job, hardware).total for job in jobs]
    rows = []
    for rate in rates:
        changed = hardware.with_rate(resource, rate)
        rows.append(tuple(b / step(j, changed).total for b, j in zip(base, jobs, strict=True)))
    return Sweep(resource, tuple(rates), tuple(rows))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How much a job gains from one resource.

    ``share`` of the step is spent on the resource, of which ``removable`` (a share of the step as
    well) shrinks with its rate; the rest is overhead of its efficiency curve.
    """

    resource: Resource
    share: float
    removable: float

    def speedup(self, factor: float) -> float:
        """Amdahl: the step's speed-up when the rate grows by ``factor``."""
        return 1 / (1 - self.removable * (1 - 1 / factor))

    @property
    def limit(self) -> float:
        """The step's speed-up when the resource takes no time at all."""
        return 1 / (1 - self.removable) if self.removable < 1 else math.inf


def sensitivities(job: Job, hardware: Hardware) -> list[Sensitivity]:
    """Every resource of a job, the one whose rate matters most first."""
    here = step(job, hardware)
    found = [
        Sensitivity(r, here.resource(r) / here.total, _removable(job, hardware, here, r))
        for r in Resource
    ]
    return sorted(found, key=lambda s: -s.removable)


def _removable(job: Job, hardware: Hardware, here: Breakdown, resource: Resource) -> float:
    """Share of the step that vanishes at an infinite rate: the slope of T over 1/rate."""
    if here.resource(resource) == 0:
        return 0.0
    # T is linear in 1/rate, so one halving of the time per byte gives the slope exactly.
    faster = step(job, hardware.scaled(resource, 2.0)).total
    return min(1.0, max(0.0, 2 * (here.total - faster) / here.total))
