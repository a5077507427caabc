"""Root cause of a failed run: the failure that came first, not those that it caused."""

from __future__ import annotations

import signal

import pytest

from nostall.core.errors import BadInput, MissingPart
from nostall.parallel.errors import RunFailed
from nostall.parallel.execute.launcher.failures import (
    RankExit,
    RankFailure,
    classify_error,
    root_cause,
)

LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:5"
TIMEOUT = "RuntimeError: Timed out waiting 60000ms for recv operation to complete"
ABORTED = """W socket.cpp says something
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)
Exception raised from checkTimeout
"""
TERM, ABORT, KILL = (-int(s) for s in (signal.SIGTERM, signal.SIGABRT, signal.SIGKILL))


def test_kinds_of_torch_errors_are_recognized() -> None:
    assert classify_error(RuntimeError(LOST)).kind == "lost"
    assert classify_error(ConnectionResetError(104, "Connection reset by peer")).kind == "lost"
    assert classify_error(RuntimeError(TIMEOUT)).kind == "timeout"
    assert classify_error(ValueError("shapes differ")) == RankFailure("ValueError: shapes differ")


@pytest.mark.parametrize(
    ("reported", "exits", "message"),
    [
        # A rank is killed; another loses the connection and may abort because of that.
        ({0: LOST}, {0: (1, 0), 1: (KILL, 0)}, "rank 1 was killed by SIGKILL"),
        ({}, {0: (ABORT, 0), 1: (KILL, 0)}, "rank 1 was killed by SIGKILL"),
        # A rank that the agent kills 30 s later, because it does not end by itself, is no cause.
        ({1: "ValueError: no"}, {0: (KILL, 30), 1: (1, 0)}, "rank 1 stopped: ValueError: no"),
        ({0: LOST, 1: "ValueError: no"}, {0: (1, 0), 1: (1, 0)}, "rank 1 stopped: ValueError"),
        # A rank exits without a report; a rank hangs.
        ({0: LOST}, {0: (1, 0), 1: (7, 0)}, "rank 1 ended with exit code 7"),
        ({0: TIMEOUT, 1: LOST}, {0: (1, 0), 1: (1, 0)}, "rank 0 waited .* more than 60 s"),
        ({}, {0: (TERM, 0), 1: (ABORT, 0, ABORTED)}, "rank 1 waited .* more than 60 s"),
        ({}, {0: (ABORT, 0, "free(): invalid pointer")}, "rank 0 stopped: free"),
        # The rank that failed first is on another machine.
        ({0: LOST, 1: LOST}, {0: (1, 0), 1: (1, 0)}, "rank 0 lost its connection"),
        ({}, {}, "a rank lost its connection"),
    ],
)
def test_the_first_failure_is_reported(
    reported: dict[int, str], exits: dict[int, tuple[int, float]], message: str
) -> None:
    error = root_cause(
        {rank: classify_error(RuntimeError(text)) for rank, text in reported.items()}
        | {
            rank: RankFailure(text)
            for rank, text in reported.items()
            if text.startswith("ValueError")
        },
        {rank: RankExit(*end) for rank, end in exits.items()},
        60,
        "logs",
    )
    with pytest.raises(RunFailed, match=message) as raised:
        raise error
    assert "see logs" in str(raised.value) and "\n" not in str(raised.value)


def test_errors_of_nostall_come_first_and_keep_their_code() -> None:
    exits = {0: RankExit(KILL, 0.0), 1: RankExit(2, 0.0)}
    bad = root_cause({1: RankFailure("the plan is bad", 2)}, exits, 60, "logs")
    assert isinstance(bad, BadInput) and str(bad) == "the plan is bad"
    missing = root_cause({1: RankFailure("no torch", 3)}, exits, 60, "logs")
    assert isinstance(missing, MissingPart)
