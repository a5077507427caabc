"""Traces that workload_gpu recorded on an H200: one step of each model, read as any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.workload import load_hardware
from nostall.workload.timeline.advice import advise
from nostall.workload.timeline.analysis import analyse
from nostall.workload.timeline.kernels import kernel_times
from nostall.workload.traces.kineto import read_kineto

TRACES = Path(__file__).parent / "h200"
MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "workload_gpu.json"
pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="benchmarks.workload.gpu has not been run on a GPU yet"
)


@pytest.mark.parametrize("model", ["resnet", "bert", "gpt"])
def test_one_step_says_what_all_profiled_steps_said(model: str) -> None:
    [found] = analyse(read_kineto(TRACES / f"{model}.json.gz"))
    whole = json.loads(MEASURED.read_text())["steps"][f"model {model}"]["measured"]
    assert "H200" in found.recording.gpu
    assert found.steps == 1
    assert sum(found.parts.values()) == pytest.approx(found.span)
    for part in ("compute", "memory"):
        assert found.parts[part] == pytest.approx(whole["parts_seconds"][part], rel=0.1), part
    assert found.kernels == pytest.approx(whole["kernels"], abs=3)


@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_products_lie_below_the_roofs_of_the_datasheet(model: str) -> None:
    [found] = analyse(read_kineto(TRACES / f"{model}.json.gz"))
    kernels = kernel_times(found, load_hardware("h200-dgx"))
    reached = [k.placement.reached for k in kernels if k.placement is not None]
    assert reached and all(0 < share < 1 for share in reached)
    assert max(reached) > 0.3
    assert any(a.level.startswith("nostall.sass") for a in advise(found, kernels))


def test_traces_are_small() -> None:
    files = sorted(TRACES.glob("*.json.gz"))
    assert len(files) >= 3
    assert all(path.stat().st_size < 300_000 for path in files)
