"""The plans of the benchmark of prefix groups: they group what its result file shows as grouped."""

from __future__ import annotations

import pytest
from benchmarks.harness.result_file import load, results
from benchmarks.serving.attention.prefix_groups import CASES, HEADS, Case, plans_of

from nostall.serving.tables.columns import PREFIX_ROWS
from nostall.serving.tables.host import build_tables

pytest.importorskip("torch", reason="plans need PyTorch and Triton")
SMS = 132


@pytest.mark.slow
def test_no_setting_keeps_the_benchmark_from_grouping() -> None:
    ungrouped = []
    for heads in HEADS:
        for case in CASES:
            batch = case.batch()
            shape, plan = plans_of(batch, heads)["together"]
            tables = build_tables(batch, plan.table_settings(shape, SMS))
            if not tables.counts[PREFIX_ROWS]:
                ungrouped.append((heads, case.name))
    # Members of these fill a tile each, so that grouping saves no tile.
    assert ungrouped == [((32, 8), "8 x 16, 4096 + 256"), ((28, 4), "64 x 8, 2048 + 512")]


def test_the_cases_are_those_of_the_result_file() -> None:
    rows = load(results("serving") / "prefix_groups_h200.json.gz")["results"]
    measured = [(tuple(row["heads"]), Case(**row["case"])) for row in rows]
    assert measured == [(heads, case) for heads in HEADS for case in CASES]
