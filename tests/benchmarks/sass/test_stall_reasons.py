"""Parsing of ncu's stall reasons, and their rows on the results page."""

from __future__ import annotations

import csv
import io

import pytest
from benchmarks.sass.pages.reasons_section import rows, shares
from benchmarks.sass.stall_reasons import parse_stall_reasons

STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def page(**values: str) -> list[str]:
    """ncu's raw page: messages, names, units, one launch."""
    text = io.StringIO()
    table = csv.writer(text, quoting=csv.QUOTE_ALL)
    table.writerows([["ID", *values], ["", *("" for _ in values)], ["0", *values.values()]])
    return ["==PROF== Connected to process 7", *text.getvalue().splitlines()]


def test_the_longest_wait_comes_first() -> None:
    values = {
        "gpu__time_duration.sum": "12,345",
        STALL.format("barrier"): "0.25",
        STALL.format("long_scoreboard"): "1,002.5",
        STALL.format("drain"): "0",
    }
    counters = parse_stall_reasons(page(**values), "")
    assert list(counters["waits"].items()) == [("long_scoreboard", 1002.5), ("barrier", 0.25)]
    assert counters["us"] == 12.345
    assert "sm_percent" not in counters


@pytest.mark.parametrize("lines", [[], ["==ERROR== ERR_NVGPUCTRPERM"], page(x="1")])
def test_an_error_if_ncu_counted_nothing(lines: list[str]) -> None:
    with pytest.raises(ValueError, match=r"ncu counted nothing.*no permission"):
        parse_stall_reasons(lines, "no permission")


def test_shares_leave_out_the_cycles_that_issue() -> None:
    parts = shares({"wait": 1.0, "selected": 5.0, "long_scoreboard": 2.0, "imc_miss": 1.0})
    assert parts["fixed latency"] == 0.25 and parts["global memory"] == 0.5
    assert parts["barrier"] == 0.0 and parts["other"] == pytest.approx(0.25)


def test_a_kernel_that_was_not_tuned_or_not_counted_has_no_row() -> None:
    counted = {"waits": {"wait": 3.0, "barrier": 1.0}, "dram_percent": 4.4, "issued_per_cycle": 0.3}
    table_rows = rows({"a": counted, "b": counted, "c": {"exit_code": 1}}, {"a": 1.02, "c": 1.0})
    assert table_rows == [["a", "75 %", "0 %", "0 %", "25 %", "0 %", "0.30", "4 %", "1.0200"]]
