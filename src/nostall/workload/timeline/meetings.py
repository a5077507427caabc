"""Collectives of several ranks, matched: what was transfer, and what waiting for the last rank.

The kernel of a collective begins when its own rank is ready and ends when the data are through, so
on a rank that came early it also waits.  The rank that came last waits for nobody: its kernel, the
shortest, is the transfer itself.  Clocks of different machines need not agree for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nostall.core.errors import BadTrace
from nostall.workload.traces.kinds import Kind, kinds
from nostall.workload.traces.recording import Recording


@dataclass(frozen=True, slots=True)
class Meeting:
    """One collective: its kernel, bytes a rank put in, and seconds of the kernel by recording."""

    name: str
    message: float
    seconds: tuple[float, ...]

    @property
    def transfer(self) -> float:
        """Seconds on the rank that came last."""
        return min(self.seconds)

    @property
    def waits(self) -> tuple[float, ...]:
        """Seconds that each rank waited for the last one."""
        return tuple(s - self.transfer for s in self.seconds)


def meetings(recordings: Sequence[Recording]) -> list[Meeting]:
    """The collectives of all ranks of a job in which every rank takes part in each of them.

    Kernels are matched by their order.  Raises :class:`~nostall.core.errors.BadTrace` for fewer
    than two ranks or where the ranks did not run the same collectives (several process groups,
    different steps).
    """
    if len(recordings) < 2:
        raise BadTrace(
            f"{len(recordings)} trace was given; waiting for other ranks shows in two or more only"
        )
    found = [_collectives(one) for one in recordings]
    first = [(name, message) for name, message, _ in found[0]]
    for one, rows in zip(recordings, found, strict=True):
        if [(name, message) for name, message, _ in rows] != first:
            raise BadTrace(
                f"{one.path}: {len(rows)} collectives, not the {len(first)} of "
                f"{recordings[0].path} in their order; give traces of the same steps of ranks "
                "that take part in every collective"
            )
    return [
        Meeting(name, message, tuple(rows[i][2] for rows in found))
        for i, (name, message) in enumerate(first)
    ]


def _collectives(one: Recording) -> list[tuple[str, float, float]]:
    """Kernel, message bytes and seconds of each communication kernel, by start."""
    own = one.activities
    rows = np.flatnonzero((kinds(own, one.names) == Kind.COMMUNICATION) & (own.kind == 0))
    return [
        (one.names[own.name[i]], float(own.message[i]), float(own.end[i] - own.start[i]))
        for i in rows
    ]
