"""Matching of the collectives of all ranks: transfer time, and waiting for the last rank.

The kernel of a collective starts when its own rank is ready and ends when the data have arrived, so
on a rank that is early it also waits.  The last rank waits for no other rank: its kernel is the
shortest, and its duration is the transfer time.  Only durations are compared, so the clocks of the
machines need not agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import BadTrace
from nostall.workload.traces.recording import ActivityType, Recording
from nostall.workload.traces.work_kinds import WorkKind, work_kinds


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """One collective on all ranks."""

    name: str
    """Name of its kernel."""
    message_bytes: float
    """Bytes that each rank contributes; 0: unknown."""
    seconds: tuple[float, ...]
    """Measured seconds of the kernel on each rank."""

    @property
    def transfer(self) -> float:
        """Seconds on the last rank."""
        return min(self.seconds)

    @property
    def waits(self) -> tuple[float, ...]:
        """Seconds that each rank waited for the last one."""
        return tuple(s - self.transfer for s in self.seconds)


def match_collectives(recordings: Sequence[Recording]) -> list[MatchedCollective]:
    """Match the collectives of all ranks of a job by their order.

    Every rank must take part in every collective.  Raises :class:`~nostall.core.errors.BadTrace`
    for fewer than two ranks, or if the ranks did not run the same collectives (several process
    groups, different steps).
    """
    if len(recordings) < 2:
        raise BadTrace(
            f"cannot match collectives of {len(recordings)} trace; give traces of two or more ranks"
        )
    per_rank = [_collectives(recording) for recording in recordings]
    first = [(name, message_bytes) for name, message_bytes, _ in per_rank[0]]
    for recording, collectives in zip(recordings, per_rank, strict=True):
        if [(name, message_bytes) for name, message_bytes, _ in collectives] != first:
            raise BadTrace(
                f"{recording.path}: its {len(collectives)} collectives are not the {len(first)} of "
                f"{recordings[0].path} in the same order; give traces of the same steps, of ranks "
                "that take part in every collective"
            )
    return [
        MatchedCollective(name, message_bytes, tuple(rank[i][2] for rank in per_rank))
        for i, (name, message_bytes) in enumerate(first)
    ]


def has_collectives(recording: Recording) -> bool:
    """Whether a trace has a communication kernel."""
    return bool(_communication_rows(recording).size)


def _collectives(recording: Recording) -> list[tuple[str, float, float]]:
    """(kernel name, message bytes, seconds) of each communication kernel, by start."""
    activities = recording.activities
    return [
        (
            recording.names[activities.name[i]],
            float(activities.message_bytes[i]),
            float(activities.end[i] - activities.start[i]),
        )
        for i in _communication_rows(recording)
    ]


def _communication_rows(recording: Recording) -> np.ndarray:
    activities = recording.activities
    is_communication = work_kinds(activities, recording.names) == WorkKind.COMMUNICATION
    return np.flatnonzero(is_communication & (activities.type == ActivityType.KERNEL))
