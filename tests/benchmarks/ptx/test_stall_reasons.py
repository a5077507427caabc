"""Stall reasons before and after the assembler search."""

from __future__ import annotations

from benchmarks.ptx.stall_reasons import largest_changes


def test_the_reasons_that_changed_most_come_first() -> None:
    counters = {
        "before": {"waits": {"wait": 3.0, "barrier": 1.0, "long_scoreboard": 2.0}},
        "after": {"waits": {"wait": 2.9, "long_scoreboard": 1.0, "membar": 0.5}},
    }
    assert largest_changes(counters) == [
        ("barrier", 1.0, 0.0),
        ("long_scoreboard", 2.0, 1.0),
        ("membar", 0.0, 0.5),
    ]
