"""What the GPU benchmarks of kept rows do without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.shared_memory_reuse import Case, Record, cubin
from benchmarks.fusion.chains.shared_memory_section import FILE, NOT_MEASURED, times
from benchmarks.fusion.chains.wide_row_programs import WIDE
from benchmarks.fusion.correctness.shared_memory_rows import drawn, summary

from nostall.fusion.codegen.tiling.legality import illegal_reason


@pytest.mark.parametrize("name", list(WIDE)[::3])
def test_a_chain_is_one_pattern_that_keeps_rows_or_not(name: str) -> None:
    case = Case(name)
    schemes = {plan.scheme for plan in case.timed}
    assert {"shared", "looped", "split"} <= schemes
    kept = {
        (plan.rematerialized, plan.async_copies) for plan in case.timed if plan.scheme == "shared"
    }
    assert kept == set(case.ways)
    assert all(illegal_reason(case.of, plan) is None for plan in case.timed)


def test_blocks_of_an_sm_follow_from_the_cubin() -> None:
    """A chain of three buffers, two of which never live together."""
    case = Case("softmax + gate + norm fp32 4096x8192")
    plan = case.ways[0, False][0]
    apart, together = (cubin(case, plan, reuse) for reuse in ("none", "order"))
    assert apart["arena"] == 3 * together["arena"] == 3 * 8192 * 4
    assert together["arena"] <= together["shared"] < together["arena"] + 1024
    assert 2 == apart["blocks_per_sm"] < together["blocks_per_sm"]


def test_reuse_is_worth_bytes_and_blocks_in_several_chains() -> None:
    chains = json.loads(FILE.read_text())["chains"]
    assert len(chains) >= 10
    gained = [
        name
        for name, found in chains.items()
        for way in found["ways"]
        if way["reuse"]["none"]["shared"]
        and way["reuse"]["order"]["shared"] < way["reuse"]["none"]["shared"]
        and way["reuse"]["order"]["blocks_per_sm"] > way["reuse"]["none"]["blocks_per_sm"]
    ]
    assert len(set(gained)) >= 4


def test_measured_chains_become_a_table() -> None:
    measured = {
        "shared": "shared 1x1024, 4 warps",
        "without": "looped 1x1024, 4 warps",
        "median_us": {"shared 1x1024, 4 warps": 90.0, "looped 1x1024, 4 warps": 99.0},
        "ratio": 1.1,
        "interval": [1.09, 1.11],
    }
    assert times({"a": {"ways": []}}) == NOT_MEASURED
    told = times({"a": {"ways": [], "measured": measured}}).splitlines()
    assert told[-1].startswith(
        "| a | looped 1x1024, 4 warps | 99.0 | shared 1x1024, 4 warps | 90.0"
    )


def test_a_record_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "buffers.json"
    Record(path).put("one", "ways", [1])
    again = Record(path)
    assert not again.lacks("one", "ways")
    assert again.lacks("one", "measured") and again.lacks("two", "ways")


def test_graphs_are_drawn_by_their_number() -> None:
    one, same = (drawn(5) for _ in range(2))
    assert one is not None and same is not None
    assert (one[0].key, one[2:]) == (same[0].key, same[2:])
    drawn_plans = [made[2] for seed in range(30) if (made := drawn(seed))]
    assert len({str(plan) for plan in drawn_plans}) > 10
    assert {(plan.peeled, plan.async_copies) for plan in drawn_plans} == {
        (odd, ahead) for odd in (False, True) for ahead in (False, True)
    }


def test_wrong_kernels_are_counted_and_kept() -> None:
    right = {"seed": 3, "plan": "shared", "reuse": "order", "wrong": []}
    lost = {"seed": 4, "plan": "?", "wrong": ["the process ended"]}
    found = summary({"3": right, "4": lost, "5": {"seed": 5, "plan": None}})
    assert (found["graphs"], found["kernels"]) == (3, 2)
    assert found["wrong"] == [lost]
