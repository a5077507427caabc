"""Analysis of one-step traces that ``benchmarks.workload.gpu`` recorded on an H200."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nostall.workload import load_hardware
from nostall.workload.timeline.analysis import build_timelines
from nostall.workload.timeline.bottlenecks import find_bottlenecks
from nostall.workload.timeline.kernels import kernel_times
from nostall.workload.traces.kineto.reader import read_kineto

TRACES = Path(__file__).parent / "h200"
MEASURED = Path(__file__).parents[3] / "benchmarks" / "workload" / "results" / "gpu.json"
pytestmark = pytest.mark.skipif(
    not TRACES.is_dir(), reason="benchmarks.workload.gpu has not been run on a GPU yet"
)


@pytest.mark.parametrize("model", ["resnet", "bert", "gpt"])
def test_one_step_has_the_times_of_the_mean_profiled_step(model: str) -> None:
    [timeline] = build_timelines(read_kineto(TRACES / f"{model}.json.gz"))
    measured = json.loads(MEASURED.read_text())["steps"][f"model {model}"]["measured"]
    assert "H200" in timeline.recording.gpu
    assert timeline.steps == 1
    assert sum(timeline.parts.values()) == pytest.approx(timeline.span)
    for part in ("compute", "memory"):
        seconds = measured["parts_seconds"][part]
        assert timeline.parts[part] == pytest.approx(seconds, rel=0.1), part
    assert timeline.num_kernels == pytest.approx(measured["kernels"], abs=3)


@pytest.mark.parametrize("model", ["bert", "gpt"])
def test_products_are_below_the_roofs_of_the_datasheet(model: str) -> None:
    [timeline] = build_timelines(read_kineto(TRACES / f"{model}.json.gz"))
    kernels = kernel_times(timeline, load_hardware("h200-dgx"))
    shares = [k.roofline.attained_share for k in kernels if k.roofline is not None]
    assert shares and all(0 < share < 1 for share in shares)
    assert max(shares) > 0.3
    bottlenecks = find_bottlenecks(timeline, kernels)
    assert any(b.remedy.startswith("nostall tune") for b in bottlenecks)


def test_traces_are_small() -> None:
    files = sorted(TRACES.glob("*.json.gz"))
    assert len(files) >= 3
    assert all(path.stat().st_size < 300_000 for path in files)
