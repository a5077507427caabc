"""The section on rollouts, from committed results and from records of fake engines."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from benchmarks.harness.result_file import load
from benchmarks.serving.engine.rollout_workloads import parse_workload, plan_of, profile

from benchmarks.serving.engine import rollouts as benchmark
from benchmarks.serving.pages import rollouts as page
from nostall.attach.rollouts.turns import measure
from tests.unit.attach.rollouts.fake_engine import FakeEngine

WORKLOADS = ("4x2@64+24", "2x2@32+24~16", "1x1@64+24")


def write(folder: Path, step_s: dict[str, float], name: str) -> Path:
    """A result file of fake engines, as the benchmark writes it."""
    engines = [FakeEngine(engine, seconds, 0.0) for engine, seconds in step_s.items()]
    for text in WORKLOADS:
        workload = parse_workload(text)
        measure(workload, engines, plan_of(workload, 4, 8), monotonic() + 60)
        profile(workload, engines)
    options = type("Options", (), {"out": folder / name, "cache_gib": 1.0})()
    benchmark._write(engines, benchmark.LLAMA, options)  # type: ignore[arg-type]
    return folder / name


@pytest.fixture
def section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    shared = write(tmp_path, {"FLASH_ATTN": 3e-3, "CUSTOM": 2e-3}, "shared.json")
    engines = write(tmp_path, {"FLASH_ATTN": 3e-3, "TRITON_ATTN": 6e-3}, "engines.json")
    monkeypatch.setattr(page, "ROLLOUTS", (shared,))
    monkeypatch.setattr(page, "ENGINES", engines)
    monkeypatch.setattr(page, "link", lambda path: path.name)
    return page.rollouts()


def cells(section: str, first: str) -> list[list[str]]:
    """The rows of all tables whose first cell is this one."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    return [row for row in rows if row[0] == first]


def test_all_tables_are_made_of_what_was_measured(section: str) -> None:
    rates, whole, steps = cells(section, "4 x 2, 64 + 24")
    assert rates[1:6] == ["4 x 8", "2,667", "4,000", "1.500 (1.500 to 1.500)", "1.000 to 1.000"]
    # 24 tokens of 8 requests: 0.5 s to the first, and 23 steps.
    assert whole[1] == f"{8 * 24 / (0.5 + 23 * 2e-3):,.0f} ({(0.5 + 69e-3) / (0.5 + 46e-3):.2f})"
    assert steps[3] == "50%"
    keys = 4 * 64 + 8 * (16 + 13)
    bound_us = 1e6 * keys * 2 * 32 * 8 * 128 * 2 / 4.8e12
    assert float(steps[4]) == pytest.approx(1.5e3 / bound_us, abs=0.01)
    assert cells(section, "TRITON_ATTN")[0][1:] == [
        "4 x 2, 64 + 24", "1,333", "0.500 (0.500 to 0.500)",
    ]  # fmt: skip


def test_records_of_one_generation_without_kernels_give_the_rates_alone() -> None:
    content: Any = load(page.FOLDER / "rollouts_shared_h200.json")
    for engine in content["engines"]:
        for row in engine["rounds"]:
            row.pop("generations", None)
            row.pop("profile", None)
    pairs = page.measured_pairs(content)
    assert pairs
    assert page._whole_generations(pairs) == page._steps([content]) == ""
    json.dumps([page.comparison(*pair).ratio for pair in pairs])


def test_an_engine_that_was_not_measured_has_no_pairs() -> None:
    content = {"engines": [{"engine": "FLASH_ATTN", "rounds": []}]}
    assert page.measured_pairs(content) == []
    assert page.rollout_ratios([content]) == []


def test_a_workload_that_was_measured_again_replaces_the_earlier_rates(tmp_path: Path) -> None:
    contents = [
        load(write(tmp_path, {"FLASH_ATTN": 3e-3, "CUSTOM": step_s}, f"{step_s}.json"))
        for step_s in (2e-3, 1e-3)
    ]
    ratios = [ratio for _, ratio in page.rollout_ratios(contents)]
    assert ratios == pytest.approx([3.0] * len(WORKLOADS))
