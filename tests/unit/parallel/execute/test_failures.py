"""Which of the failures of a run is told: the one that came first, not what it led to."""

from __future__ import annotations

import signal

import pytest

from nostall.core.errors import BadInput, MissingPart
from nostall.parallel.errors import RunFailed
from nostall.parallel.execute.failures import Exit, Failure, cause, failure_of

RESET = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"
LATE = "RuntimeError: Timed out waiting 60000ms for recv operation to complete"
ABORTED = """W socket.cpp says something
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
Exception raised from checkTimeout
"""
TERM, ABORT, KILL = (-int(s) for s in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL))


def test_torch_errors_are_told_apart() -> None:
    assert failure_of(RuntimeError(RESET)).kind == "lost"
    assert failure_of(ConnectionResetError(104, "Connection reset by peer")).kind == "lost"
    assert failure_of(RuntimeError(LATE)).kind == "timeout"
    assert failure_of(ValueError("shapes differ")) == Failure("ValueError: shapes differ")


@pytest.mark.parametrize(
    ("told", "exits", "wanted"),
    [
        # A killed rank; the others lose it, and one aborts over that.
        ({0: RESET}, {0: (1, 0), 1: (KILL, 0)}, "rank 1 was killed by SIGKILL"),
        ({}, {0: (ABORT, 0), 1: (KILL, 0)}, "rank 1 was killed by SIGKILL"),
        # What the agent kills 30 s later, because it does not end by itself, is not the cause.
        ({1: "ValueError: no"}, {0: (KILL, 30), 1: (1, 0)}, "rank 1 stopped: ValueError: no"),
        ({0: RESET, 1: "ValueError: no"}, {0: (1, 0), 1: (1, 0)}, "rank 1 stopped: ValueError"),
        # A rank that leaves without a word, and one that hangs.
        ({0: RESET}, {0: (1, 0), 1: (7, 0)}, "rank 1 ended with exit code 7"),
        ({0: LATE, 1: RESET}, {0: (1, 0), 1: (1, 0)}, "rank 0 waited .* more than 60 s"),
        ({}, {0: (TERM, 0), 1: (ABORT, 0, ABORTED)}, "rank 1 waited .* more than 60 s"),
        ({}, {0: (ABORT, 0, "free(): invalid pointer")}, "rank 0 stopped: free"),
        # The rank that knows is on another machine.
        ({0: RESET, 1: RESET}, {0: (1, 0), 1: (1, 0)}, "rank 0 lost its connection"),
        ({}, {}, "a rank lost its connection"),
    ],
)
def test_the_first_failure_is_told(
    told: dict[int, str], exits: dict[int, tuple[int, float]], wanted: str
) -> None:
    found = cause(
        {rank: failure_of(RuntimeError(text)) for rank, text in told.items()}
        | {rank: Failure(text) for rank, text in told.items() if text.startswith("ValueError")},
        {rank: Exit(*end) for rank, end in exits.items()},
        60,
        "logs",
    )
    with pytest.raises(RunFailed, match=wanted) as raised:
        raise found
    assert "see logs" in str(raised.value) and "\n" not in str(raised.value)


def test_errors_of_our_own_come_first_and_keep_their_code() -> None:
    exits = {0: Exit(KILL, 0.0), 1: Exit(2, 0.0)}
    bad = cause({1: Failure("the plan is bad", 2)}, exits, 60, "logs")
    assert isinstance(bad, BadInput) and str(bad) == "the plan is bad"
    missing = cause({1: Failure("no torch", 3)}, exits, 60, "logs")
    assert isinstance(missing, MissingPart)
