"""Hardware for job tables without ``--hardware``: the oldest preset that has their precisions."""

from __future__ import annotations

from collections.abc import Iterable

from nostall.workload.hardware.description import Hardware
from nostall.workload.hardware.file import load_hardware
from nostall.workload.jobs.record import Job

CANDIDATES = ("pai-2018", "v100-dgx1", "a100-dgx", "h100-dgx", "h200-dgx")
"""Presets by age.  The first one is that of arXiv:1910.05930, which has fp32 only."""


def default_hardware(jobs: Iterable[Job]) -> Hardware:
    """The first of :data:`CANDIDATES` on which the most jobs can run, by their precisions."""
    precisions = [job.precision for job in jobs]

    def can_run(hardware: Hardware) -> int:
        return sum(precision in hardware.flops for precision in precisions)

    return max((load_hardware(name) for name in CANDIDATES), key=can_run)
