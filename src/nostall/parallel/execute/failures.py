"""Why a run ended early: what each rank said and how it exited, boiled down to one error.

One failure makes others: the ranks that are left lose their connections, wait in vain, or are
stopped.  The one that came first is worth telling.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nostall.core.errors import BadInput, MissingPart, NostallError
from nostall.parallel.errors import RunFailed

_BAD_INPUT = 2
_TIMED_OUT = ("timed out", "timeout")
_LOST = (
    "connection reset",
    "connection closed",
    "connection was closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process",
)
"""What gloo, NCCL and the store say when the other side is gone, in lower case."""
_AGENT_KILLS_AFTER_S = 20.0
"""The agent kills (SIGKILL) 30 s after the first failure what does not end by itself."""


@dataclass(frozen=True)
class Failure:
    """What stopped a rank, in its own words.

    ``code`` is the exit code of one of nostall's own errors.  Else it is None, and ``kind`` says
    whether the rank waited too long, lost another one, or stopped for a reason of its own.
    """

    text: str
    code: int | None = None
    kind: Literal["own", "timeout", "lost"] = "own"


@dataclass(frozen=True)
class Exit:
    """How a rank's process ended: exit code (below 0 a signal), when, and the end of what it
    printed."""

    code: int
    time: float
    printed: str = ""


def failure_of(error: Exception) -> Failure:
    """One of torch's errors, which have no classes for what happened."""
    return _sorted(f"{type(error).__name__}: {error}")


def _sorted(text: str) -> Failure:
    said = text.lower()
    if any(word in said for word in _TIMED_OUT):
        return Failure(text, kind="timeout")
    return Failure(text, kind="lost" if any(word in said for word in _LOST) else "own")


def cause(
    told: Mapping[int, Failure], exits: Mapping[int, Exit], deadline: float, logs: str
) -> NostallError:
    """The one error worth telling, by rank: ``deadline`` in seconds, ``logs`` where to look.

    Bad input first, then who was killed, then who stopped for a reason of its own, then who waited
    too long, and only then who lost another rank.
    """
    for _, failure in sorted(told.items()):
        if failure.code is not None:
            kind = BadInput if failure.code == _BAD_INPUT else MissingPart
            return kind(failure.text)
    if (rank := _killed(exits)) is not None:
        name = signal.Signals(-exits[rank].code).name
        return RunFailed(
            f"rank {rank} was killed by {name}; the other ranks were stopped; see {logs}, and "
            "start again"
        )
    found = dict(told) | {
        rank: _sorted(_last_words(end.printed))
        for rank, end in exits.items()
        if rank not in told and end.code == -signal.SIGABRT
    }
    for rank, failure in sorted(found.items()):
        if failure.kind == "own":
            line = failure.text.strip().partition("\n")[0][:300] or "it was aborted"
            return RunFailed(f"rank {rank} stopped: {line}; see {logs}")
    for rank, end in sorted(exits.items()):
        if rank not in found and end.code > 0:
            return RunFailed(f"rank {rank} ended with exit code {end.code}; see {logs}")
    for rank, failure in sorted(found.items()):
        if failure.kind == "timeout":
            return RunFailed(
                f"rank {rank} waited for another rank for more than {deadline:g} s; a rank hangs, "
                f"or --deadline is too short; see {logs}"
            )
    who = f"rank {min(found)}" if found else "a rank"
    return RunFailed(
        f"{who} lost its connection to another rank, which ended without a word here; if the run "
        f"has several machines, the others say why; see {logs}"
    )


def _killed(exits: Mapping[int, Exit]) -> int | None:
    """The rank that a signal from outside ended first; aborts are the process's own doing."""
    own = (signal.SIGTERM, signal.SIGABRT)
    first = min((end.time for end in exits.values()), default=0.0)
    dead = [
        (end.time, rank)
        for rank, end in exits.items()
        if end.code < 0 and -end.code not in own and end.time - first < _AGENT_KILLS_AFTER_S
    ]
    return min(dead)[1] if dead else None


def _last_words(printed: str) -> str:
    """Of what an aborted process printed, the line that says why: C++'s ``what()``, or the last."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    what = [line for line in lines if "what():" in line]
    return (what or lines or [""])[-1].rpartition("what():")[2].strip()
