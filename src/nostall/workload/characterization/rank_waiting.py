"""Time that the ranks of a job spend in their collectives, and waiting for each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.workload.timeline.collectives import has_collectives, match_with_remarks
from nostall.workload.traces.recording import Recording


@dataclass(frozen=True)
class RankWaiting:
    """Time that one rank spends in the collectives of the job."""

    recording: Recording
    collective_seconds: float
    """Measured seconds of all collectives on this rank."""
    waiting_seconds: float
    """Seconds of these that the rank waits for the last rank."""
    name: str
    """The label of its trace."""


@dataclass(frozen=True)
class CollectiveSummary:
    """The collectives that all ranks of a job run together, measured."""

    collectives: int
    """Number of collectives."""
    message_bytes: float
    """Bytes that one rank contributes to all of them."""
    transfer_seconds: float
    """Seconds of all collectives without waiting."""
    ranks: tuple[RankWaiting, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "measured",
            "collectives": self.collectives,
            "message_bytes": self.message_bytes,
            "transfer_seconds": self.transfer_seconds,
            "ranks": [
                {
                    "file": str(rank.recording.path),
                    "rank": rank.recording.rank,
                    "collective_seconds": rank.collective_seconds,
                    "waiting_seconds": rank.waiting_seconds,
                }
                for rank in self.ranks
            ],
        }


def are_ranks_of_one_job(recordings: Sequence[Recording]) -> bool:
    """Whether the traces can be of different ranks of one job, and run collectives.

    Traces without ranks can be; only their collectives tell.
    """
    ranks = {recording.rank for recording in recordings}
    return (
        len(recordings) > 1
        and (ranks == {None} or (None not in ranks and len(ranks) == len(recordings)))
        and len({recording.world_size for recording in recordings}) == 1
        and any(has_collectives(recording) for recording in recordings)
    )


def collective_summary(
    recordings: Sequence[Recording], labels: Mapping[Path, str]
) -> tuple[CollectiveSummary | None, list[str]]:
    """The summary (None if no collective has two traces), and what it does not count."""
    collectives, remarks = match_with_remarks(recordings)
    if not collectives:
        return None, remarks
    seconds, waits = [0.0] * len(recordings), [0.0] * len(recordings)
    for collective in collectives:
        rows = zip(collective.ranks, collective.seconds, collective.waits, strict=True)
        for rank, spent, waited in rows:
            seconds[rank] += spent
            waits[rank] += waited
    summary = CollectiveSummary(
        collectives=len(collectives),
        message_bytes=sum(c.message_bytes for c in collectives),
        transfer_seconds=sum(c.transfer for c in collectives),
        ranks=tuple(
            RankWaiting(recording, spent, waited, labels[recording.path])
            for recording, spent, waited in zip(recordings, seconds, waits, strict=True)
        ),
    )
    return summary, remarks
