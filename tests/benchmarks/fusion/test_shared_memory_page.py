"""Tests of the benchmarks of rows in shared memory, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.mechanisms.shared_memory_reuse import Case, Record, cubin_resources
from benchmarks.fusion.chains.mechanisms.wide_row_programs import WIDE_ROW_CHAINS
from benchmarks.fusion.chains.shared_memory_section import FILE, NOT_MEASURED, times
from benchmarks.fusion.correctness.shared_memory_rows import draw_case, summary

from nostall.fusion.codegen.tiling.legality import illegal_reason

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", list(WIDE_ROW_CHAINS)[::3])
def test_timed_plans_have_all_schemes_and_shared_memory_variants(name: str) -> None:
    case = Case(name)
    schemes = {plan.scheme for plan in case.timed_plans}
    assert {"shared", "looped", "split"} <= schemes
    variants = {
        (plan.rematerialized, plan.async_copies)
        for plan in case.timed_plans
        if plan.scheme == "shared"
    }
    assert variants == set(case.shared_plans)
    assert all(illegal_reason(case.schedule, plan) is None for plan in case.timed_plans)


def test_reuse_of_buffers_raises_the_blocks_of_an_sm() -> None:
    """The chain has three buffers that can all share the same memory."""
    case = Case("softmax + gate + norm fp32 4096x8192")
    plan = case.shared_plans[0, False][0]
    without_reuse, with_reuse = (cubin_resources(case, plan, reuse) for reuse in ("none", "order"))
    assert without_reuse["arena"] == 3 * with_reuse["arena"] == 3 * 8192 * 4
    assert with_reuse["arena"] <= with_reuse["shared"] < with_reuse["arena"] + 1024
    assert 2 == without_reuse["blocks_per_sm"] < with_reuse["blocks_per_sm"]


def test_committed_results_show_gains_by_reuse() -> None:
    chains = json.loads(FILE.read_text())["chains"]
    assert len(chains) >= 10
    gained = [
        name
        for name, chain in chains.items()
        for variant in chain["ways"]
        if variant["reuse"]["none"]["shared"]
        and variant["reuse"]["order"]["shared"] < variant["reuse"]["none"]["shared"]
        and variant["reuse"]["order"]["blocks_per_sm"] > variant["reuse"]["none"]["blocks_per_sm"]
    ]
    assert len(set(gained)) >= 4


def test_the_table_of_times_has_measured_chains_only() -> None:
    measured = {
        "shared": "shared 1x1024, 4 warps",
        "without": "looped 1x1024, 4 warps",
        "median_us": {"shared 1x1024, 4 warps": 90.0, "looped 1x1024, 4 warps": 99.0},
        "ratio": 1.1,
        "interval": [1.09, 1.11],
    }
    assert times({"a": {"ways": []}}) == NOT_MEASURED
    lines = times({"a": {"ways": [], "measured": measured}}).splitlines()
    assert lines[-1].startswith(
        "| a | looped 1x1024, 4 warps | 99.0 | shared 1x1024, 4 warps | 90.0"
    )


def test_a_record_resumes_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "buffers.json"
    Record(path).add("one", "ways", [1])
    reopened = Record(path)
    assert not reopened.is_missing("one", "ways")
    assert reopened.is_missing("one", "measured") and reopened.is_missing("two", "ways")


def test_a_graph_depends_on_its_number_only() -> None:
    first, second = (draw_case(5) for _ in range(2))
    assert first is not None and second is not None
    assert (first[0].key, first[2:]) == (second[0].key, second[2:])
    drawn_plans = [made[2] for seed in range(30) if (made := draw_case(seed))]
    assert len({str(plan) for plan in drawn_plans}) > 10
    assert {(plan.peeled, plan.async_copies) for plan in drawn_plans} == {
        (odd, ahead) for odd in (False, True) for ahead in (False, True)
    }


def test_the_summary_counts_and_keeps_wrong_kernels() -> None:
    right = {"seed": 3, "plan": "shared", "reuse": "order", "wrong": []}
    crashed = {"seed": 4, "plan": "?", "wrong": ["the process ended"]}
    counts = summary({"3": right, "4": crashed, "5": {"seed": 5, "plan": None}})
    assert (counts["graphs"], counts["kernels"]) == (3, 2)
    assert counts["wrong"] == [crashed]
