"""Launch parameters of a trace's kernels, also of damaged events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.core.errors import BadTrace
from nostall.workload.traces.launches import read_launches

SOUND = {"grid": [4, 1, 1], "block": [128, 1, 1], "registers per thread": 32, "shared memory": 16}
KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1.0, "dur": 3.0, "args": SOUND}


def write(path: Path, events: list[object]) -> Path:
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_launches_with_the_same_parameters_are_summed(tmp_path: Path) -> None:
    other = {**KERNEL, "dur": 10.0, "args": {**SOUND, "registers per thread": 64}}
    first, second = read_launches(write(tmp_path / "a.json", [KERNEL, KERNEL, other]))
    assert (first.registers, first.count, first.seconds) == (64, 1, pytest.approx(1e-5))
    assert (second.grid, second.block, second.shared_memory) == ((4, 1, 1), (128, 1, 1), 16)
    assert (second.count, second.seconds) == (2, pytest.approx(6e-6))


@pytest.mark.parametrize(
    "change",
    [
        {"args": {}},
        {"args": {**SOUND, "grid": "4,1,1"}},
        {"args": {**SOUND, "grid": [4, 1]}},
        {"args": {**SOUND, "grid": [0, 1, 1]}},
        {"args": {**SOUND, "block": [1 << 40, 1, 1]}},
        {"args": {**SOUND, "registers per thread": None}},
        {"args": {**SOUND, "shared memory": -1}},
        {"args": 3},
        {"dur": "3"},
        {"dur": 0},
        {"dur": 1e400},
        {"name": None},
        {"cat": "cpu_op"},
        {"ph": "B"},
    ],
)
def test_events_without_sound_parameters_are_left_out(
    tmp_path: Path, change: dict[str, object]
) -> None:
    rows = read_launches(write(tmp_path / "a.json", [{**KERNEL, **change}, KERNEL]))
    assert [(row.name, row.count) for row in rows] == [("k", 1)]


def test_a_file_without_events_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("nothing")
    with pytest.raises(BadTrace, match=r"a\.json"):
        read_launches(tmp_path / "a.json")
