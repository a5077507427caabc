"""Tests of the turns of engines on fake engines, and of the ratios of their records."""

from __future__ import annotations

from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from benchmarks.serving.engine.rollout_child import Event, summary
from benchmarks.serving.engine.rollout_workloads import (
    GrowingRollout,
    Workload,
    compare,
    parse_workload,
    plan_of,
    profile,
)
from benchmarks.serving.engine.rollouts import equal_tokens
from hypothesis import given
from hypothesis import strategies as st

from nostall.attach.rollouts.job import rates, repeated, whole_rate
from nostall.attach.rollouts.turns import SLACK, measure
from nostall.core.errors import BadInput
from tests.unit.attach.rollouts.fake_engine import FakeEngine


def measured(workload: Workload, *engines: FakeEngine, rounds: int = 8, steps: int = 16) -> None:
    plan = plan_of(workload, rounds, steps)
    measure(workload, engines, plan, monotonic() + 60)


@given(st.integers(9, 600), st.integers(1, 20), st.integers(1, 100), st.booleans())
def test_a_plan_has_the_rounds_in_equal_generations_or_says_that_none_fits(
    new: int, rounds: int, steps: int, grows: bool
) -> None:
    workload = GrowingRollout(2, 2, 64, new, growth=16 * grows)
    if new < steps + SLACK:
        with pytest.raises(BadInput, match=f"{steps + SLACK} tokens or more"):
            plan_of(workload, rounds, steps)
        return
    plan = plan_of(workload, rounds, steps)
    assert plan.generations >= 2 * workload.histories
    assert plan.turns * plan.generations >= rounds
    assert plan.turns * plan.steps + SLACK <= new < (plan.turns + 1) * plan.steps + SLACK


def test_engines_take_turns_and_the_first_one_of_a_round_alternates() -> None:
    order: list[str] = []

    class Watched(FakeEngine):
        def _decode(self, command: dict[str, Any]) -> dict[str, Any]:
            if command["steps"] == 16:
                order.append(self.name)
            return super()._decode(command)

    measured(GrowingRollout(2, 2, 32, 72), Watched("a", 1e-3, 0.0), Watched("b", 1e-3, 0.0))
    assert order[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert len(order) == 16


def test_the_ratio_and_the_null_are_those_of_the_engines() -> None:
    base, ours = FakeEngine("FLASH_ATTN", 2e-3, 1e-4), FakeEngine("CUSTOM", 1e-3, 1e-4)
    measured(GrowingRollout(2, 5, 32, 72), base, ours)
    (base_row,), (row,) = base.record["rounds"], ours.record["rounds"]
    found = compare(row, base_row)
    assert found.ratio == pytest.approx((2e-3 + 1e-3) / (1e-3 + 1e-3))
    assert (found.null_low, found.null_high) == (1.0, 1.0)
    assert found.verdict == "faster"
    assert len(list(repeated(row))) == 4
    assert rates(row) == pytest.approx([10 / 2e-3] * 8)
    assert equal_tokens(row, base_row) == 1.0


def test_whole_generations_count_all_tokens_and_all_times() -> None:
    engine = FakeEngine("CUSTOM", 1e-2, 0.0)
    measured(GrowingRollout(2, 2, 32, 72), engine, rounds=2)
    (row,) = engine.record["rounds"]
    assert whole_rate(row) == pytest.approx(4 * 72 / (0.5 + 71e-2))
    assert whole_rate(row, with_prompts=True) == pytest.approx(4 * 72 / (1.5 + 71e-2))


def test_requests_that_end_at_different_steps_give_all_tokens_over_all_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "short.csv"
    lengths = [3, 40, 17, 25]
    lines = [f"2023-11-16 18:15:0{n},100,{length}\n" for n, length in enumerate(lengths)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(lines))
    monkeypatch.setattr(
        "tests.unit.attach.rollouts.fake_engine.parse_workload",
        lambda text: parse_workload(text, tmp_path),
    )
    workload = parse_workload("2x2@32+short.csv", tmp_path)
    base, ours = FakeEngine("FLASH_ATTN", 1e-3, 1e-3), FakeEngine("CUSTOM", 1e-3, 0.0)
    measured(workload, base, ours, steps=10)
    (base_row,), (row,) = base.record["rounds"], ours.record["rounds"]
    assert [turn["steps"] for turn in row["turns"]] == [10, 10, 10, 9] * 2
    assert sum(turn["tokens"] for turn in row["turns"]) == 2 * (sum(lengths) - 4)
    found = compare(row, base_row, is_ragged=True)
    assert found.ratio == pytest.approx((39e-3 + (sum(lengths) - 4) * 1e-3) / 39e-3)
    assert found.low <= found.ratio <= found.high
    assert (found.null_low, found.null_high) == (1.0, 1.0)


@pytest.mark.parametrize("fails_at", [0, 1, 4, 6])
def test_an_engine_with_a_problem_leaves_the_other_one_measured(fails_at: int) -> None:
    base = FakeEngine("FLASH_ATTN", 1e-3, 0.0)
    ours = FakeEngine("CUSTOM", 1e-3, 0.0, fails_at)
    measured(GrowingRollout(2, 2, 32, 72), base, ours)
    assert ours.problem
    assert len(ours.asked) == fails_at + 1
    assert len(base.record["rounds"][0]["turns"]) == 8
    assert whole_rate(base.record["rounds"][0]) is not None


def test_a_profile_is_of_a_short_generation_and_joins_the_row() -> None:
    workload = parse_workload("2x2@32+72~16")
    engine = FakeEngine("CUSTOM", 1e-3, 0.0)
    measured(workload, engine)
    profile(workload, [engine])
    asked = [command for command in engine.asked if command.get("most")]
    assert [command["generation"] for command in asked] == [6]  # the longest history
    found = engine.record["rounds"][0]["profile"]
    assert found["busy_us"] == pytest.approx(8e3)
    assert found["distinct_keys"] == 2 * (32 + 3 * 16) + 4 * (16 + 13)


def test_times_of_kernels_that_overlap_are_busy_once() -> None:
    events = [
        Event("void cutlass_gemm", 0.0, 10.0),
        Event("_meta_attention_kernel", 8.0, 14.0),
        Event("FlashAttnFwdSm90", 12.0, 15.0),
        Event("Memcpy DtoD", 20.0, 22.0),
    ]
    found = summary(reversed(events))
    assert found["busy_us"] == 17.0
    assert found["span_us"] == 22.0
    assert found["attention_us"] == 7.0
    assert found["kernels"]["void cutlass_gemm"] == [1, 10.0]
    assert summary([]) == {"problem": "the profiler saw no kernel"}
