"""Root cause of a failed run: one error from what each rank reported and how it exited.

One failure causes others: the remaining ranks lose their connections, wait until a timeout, or are
stopped by the launcher.  The failure that came first is reported.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from nostall.core.errors import BadInput, MissingPart, NostallError
from nostall.parallel.errors import RunFailed

_BAD_INPUT_CODE = 2
_TIMEOUT_PHRASES = ("timed out", "timeout")
_CONNECTION_LOST_PHRASES = (
    "connection reset",
    "connection closed",
    "connection was closed",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process",
)
"""Parts of messages of gloo, NCCL and torch's store if the peer is gone, in lower case."""
_LAUNCHER_KILLS_AFTER_S = 20.0
"""torchrun's agent kills (SIGKILL) ranks that have not ended 30 s after the first failure; a rank
killed at least this many seconds after the first exit counts as killed by the agent."""


@dataclass(frozen=True)
class RankFailure:
    """The error that stopped a rank, as the rank reported it."""

    text: str
    code: int | None = None
    """Exit code of an error of nostall's own; None for any other error."""
    kind: Literal["own", "timeout", "lost"] = "own"
    """Whether the rank stopped for a reason of its own, waited too long for another rank, or lost
    the connection to another rank."""


@dataclass(frozen=True)
class RankExit:
    """Exit of a rank's process."""

    code: int
    """Exit code; below 0 it is the negative number of a signal."""
    time: float
    """End of the process, in seconds since the epoch."""
    printed: str = ""
    """The last part of its standard error."""


def classify_error(error: Exception) -> RankFailure:
    """Failure from an error of torch, whose kind can be recognised only by its message."""
    return _classify_text(f"{type(error).__name__}: {error}")


def _classify_text(text: str) -> RankFailure:
    message = text.lower()
    if any(phrase in message for phrase in _TIMEOUT_PHRASES):
        return RankFailure(text, kind="timeout")
    is_lost = any(phrase in message for phrase in _CONNECTION_LOST_PHRASES)
    return RankFailure(text, kind="lost" if is_lost else "own")


def root_cause(
    reported: Mapping[int, RankFailure], exits: Mapping[int, RankExit], deadline: float, logs: str
) -> NostallError:
    """The error to raise for a failed run; ``reported`` and ``exits`` are by rank.

    In order of priority: an error of nostall's own, a killed rank, a rank that stopped for a reason
    of its own, an exit code without a report, a timeout, and a lost connection.  ``deadline`` is in
    seconds; ``logs`` is the folder that the message names.
    """
    for _, failure in sorted(reported.items()):
        if failure.code is not None:
            kind = BadInput if failure.code == _BAD_INPUT_CODE else MissingPart
            return kind(failure.text)
    if (rank := _first_killed(exits)) is not None:
        name = signal.Signals(-exits[rank].code).name
        return RunFailed(
            f"rank {rank} was killed by {name}; the other ranks were stopped; see {logs}, and "
            "start again"
        )
    failures = dict(reported) | {
        rank: _classify_text(_abort_message(end.printed))
        for rank, end in exits.items()
        if rank not in reported and end.code == -signal.SIGABRT
    }
    for rank, failure in sorted(failures.items()):
        if failure.kind == "own":
            line = failure.text.strip().partition("\n")[0][:300] or "it was aborted"
            return RunFailed(f"rank {rank} stopped: {line}; see {logs}")
    for rank, end in sorted(exits.items()):
        if rank not in failures and end.code > 0:
            return RunFailed(f"rank {rank} ended with exit code {end.code}; see {logs}")
    for rank, failure in sorted(failures.items()):
        if failure.kind == "timeout":
            return RunFailed(
                f"rank {rank} waited for another rank for more than {deadline:g} s; a rank hangs, "
                f"or --deadline is too short; see {logs}"
            )
    rank_name = f"rank {min(failures)}" if failures else "a rank"
    return RunFailed(
        f"{rank_name} lost its connection to another rank, which ended without an error report on "
        "this machine; if the run has several machines, another one reports the error; see "
        f"{logs}"
    )


def _first_killed(exits: Mapping[int, RankExit]) -> int | None:
    """The rank that was first killed from outside; None if none was.

    SIGABRT comes from the process itself, SIGTERM from the launcher.
    """
    not_outside = (signal.SIGTERM, signal.SIGABRT)
    first = min((end.time for end in exits.values()), default=0.0)
    killed = [
        (end.time, rank)
        for rank, end in exits.items()
        if end.code < 0
        and -end.code not in not_outside
        and end.time - first < _LAUNCHER_KILLS_AFTER_S
    ]
    return min(killed)[1] if killed else None


def _abort_message(printed: str) -> str:
    """The reason that an aborted process printed: the text after C++'s ``what():``, or its last
    line."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    what = [line for line in lines if "what():" in line]
    return (what or lines or [""])[-1].rpartition("what():")[2].strip()
