"""Jobs of ``benchmarks.torch_compile.models``: expected times, and queues of the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.torch_compile.model_setup import (
    AGAIN,
    INTERLEAVED,
    PAIRED,
    PROCESS_COUNTS,
    START_METHODS,
    Setup,
)

PAIR_SECONDS = {PAIRED: 25, AGAIN: 8}
"""Expected seconds of one process of a pair."""
EXPECTED_SECONDS = {
    "bert-train": {"inductor": 50, "nostall": 100, "steady": 70, "autotuned": 200, "graphs": 120},
    "bert-infer": {"inductor": 25, "nostall": 60, "steady": 40, "autotuned": 120, "graphs": 70},
}
EXPECTED_SECONDS_OTHERS = {
    "inductor": 25,
    "nostall": 60,
    "steady": 50,
    "gain": 120,
    "autotuned": 100,
    "graphs": 60,
}
"""Expected seconds of parts, for scheduling only."""
ROUND_SECONDS = {"bert-train": 35}
ROUND_SECONDS_OTHERS = 20
"""Expected seconds of each process of ``graphs`` after the first, which compiles everything."""
INDEPENDENT_PARTS = {"inductor", PAIRED}
"""Parts whose caches no other part uses, except ``AGAIN``."""
SLACK_SECONDS = 120.0
"""Seconds beyond the expected ones after which a process is killed."""
INTERPRETER_SLOWDOWN = 8.0
"""Factor on expected seconds in Triton's interpreter."""


@dataclass(frozen=True)
class Job:
    """A part of a model to run."""

    setup: Setup
    deadline: float
    """When it has to end, in seconds of the monotonic clock."""
    caches: str
    """Folder of the model's caches."""

    @property
    def expected_seconds(self) -> float:
        """Expected seconds of all processes of the part."""
        if self.setup.part in PAIR_SECONDS:
            pairs = self.setup.pairs if self.setup.recorded else 0
            methods = len(START_METHODS[self.setup.part])
            recorded = PAIR_SECONDS[self.setup.part] * methods * pairs
            return self.slowdown * (PAIR_SECONDS[PAIRED] + recorded)
        seconds = EXPECTED_SECONDS_OTHERS | EXPECTED_SECONDS.get(self.setup.model, {})
        first = seconds[self.setup.part]
        further_processes = PROCESS_COUNTS.get(self.setup.part, 1) - 1
        return self.slowdown * (first + further_processes * self.round_seconds)

    @property
    def round_seconds(self) -> float:
        """Expected seconds of each process after the first."""
        return ROUND_SECONDS.get(self.setup.model, ROUND_SECONDS_OTHERS)

    @property
    def slowdown(self) -> float:
        """Factor on expected seconds of the device."""
        return 1.0 if self.setup.device == "cuda" else INTERPRETER_SLOWDOWN

    @property
    def max_seconds(self) -> float:
        """Time limit in seconds of one process."""
        return min(self.setup.seconds, self.expected_seconds + SLACK_SECONDS)


def assign_jobs(jobs: Sequence[Job], gpus: int) -> list[list[Job]]:
    """Distribute jobs over GPUs: the longest group goes first, to the shortest queue.

    Parts that use ``nostall``'s caches follow it in the same queue; the parts of other modes come
    last.
    """
    queues: list[list[Job]] = [[] for _ in range(gpus)]
    mode_jobs = [
        job for job in jobs if job.setup.part in INTERLEAVED and job.setup.part != "steady"
    ]
    groups: dict[tuple[str, str], list[Job]] = {}
    has_warm_pairs = any(job.setup.part == AGAIN for job in jobs)
    for job in jobs:
        if job not in mode_jobs:
            group_key = (
                job.setup.part
                if job.setup.part in ({PAIRED} if has_warm_pairs else INDEPENDENT_PARTS)
                else ""
            )
            groups.setdefault((job.setup.model, group_key), []).append(job)

    def expected_total(group: Sequence[Job]) -> float:
        return sum(job.expected_seconds for job in group)

    for group in sorted(groups.values(), key=expected_total, reverse=True):
        min(queues, key=expected_total).extend(group)
    for job in sorted(mode_jobs, key=lambda job: job.expected_seconds):
        min(queues, key=expected_total).append(job)
    return queues
