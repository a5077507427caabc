"""Damaged trial logs: each bad row costs itself, and a remark names it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import Run, Trial
from nostall.core.trial_log import TrialLog, read_trials

TRIALS = [
    Trial(0, 1e-6, True, 1e-6, "start", 0, 0.0),
    Trial(1, 9e-7, True, 9e-7, 'slide("a", 1), "twice"', 3, 0.125),
    Trial(2, math.inf, False, 9e-7, "two\nlines", 4, 0.25, "illegal address, at 0x10"),
    Trial(3, 8e-7, True, 8e-7, "x", 4, 1.0),
    Trial(4, 8.5e-7, False, 8e-7, "y", 4, 1.5),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    with Run.create(tmp_path / "run", "tune", {}) as run:
        for trial in TRIALS:
            run.on_trial(trial)
    return tmp_path / "run" / "trials.csv"


def damaged(log: Path, old: bytes, new: bytes) -> TrialLog:
    content = log.read_bytes()
    assert old in content
    log.write_bytes(content.replace(old, new))
    return read_trials(log)


def test_a_whole_log_has_no_remarks(log: Path) -> None:
    assert read_trials(log) == TrialLog(tuple(TRIALS))
    assert read_trials(log.with_name("none")) == TrialLog()


@pytest.mark.parametrize(
    ("old", "new", "lost", "remark"),
    [
        (b"8e-07,True", b"\xff\xfe\x00\x80,True", 3, "not text in CSV form (line 6)"),
        (b"8e-07,True", b"nan,True", 3, "neither a time nor a failure (line 6)"),
        (b"8e-07,True", b"inf,True", 3, "neither a time nor a failure (line 6)"),
        (b"8e-07,True", b"fast,True", 3, "not of its column's type (line 6)"),
        (b"8.5e-07,False,8e-07", b"8.5e-07,False,nan", 4, "a number is not finite (line 7)"),
        (b"x,4,1.0,", b'"x,4,1.0,', 3, "not text in CSV form (line 6)"),
        (b"y,4,1.5,\r\n", b"y,4,1.", 4, "the row is cut off (line 7)"),
        (b"y,4,1.5,\r\n", b"y,4,1.5,", 4, "the row is cut off (line 7)"),
        (b"x,4,1.0,", b"x,4", 3, "does not have 8 cells (line 6)"),
    ],
)
def test_a_bad_row_costs_itself(log: Path, old: bytes, new: bytes, lost: int, remark: str) -> None:
    found = damaged(log, old, new)
    assert list(found.trials) == [trial for trial in TRIALS if trial.index != lost]
    assert len(found.remarks) == 1 and remark in found.remarks[0]
    assert found.remarks[0].startswith("trials.csv: 1 row left out, because ")


@given(st.binary(max_size=60), st.integers(0, 400))
def test_any_bytes_are_read_or_remarked(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "trials.csv"
    rows = b"".join(b"%d,1.0,True,1.0,m,0,0.5,\r\n" % index for index in range(12))
    path.write_bytes(rows[:at] + noise + rows[at:])
    found = read_trials(path)
    assert all(math.isfinite(trial.value) or trial.failure for trial in found.trials)
    assert found.remarks or len(found.trials) >= 12
