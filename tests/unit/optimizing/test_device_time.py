"""Times of the device in a trace, and the bounds that follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nostall.core.errors import BadTrace
from nostall.optimizing.device_time import PADDED, read_device_time, traced
from nostall.workload.timeline.analysis import build_timelines
from nostall.workload.traces.kineto.reader import read_kineto
from tests.unit.workload.trace_events import event, kernel, launch, trace, write

H200 = Path(__file__).parents[1] / "workload" / "h200"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, f, 2>(int, f, Array)"
PRODUCT = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"


def two_steps(*more: dict[str, Any]) -> dict[str, Any]:
    """Steps of 1000 us: 100 pointwise, 200 product, 50 in the optimiser, 20 beside the product."""
    events: list[dict[str, Any]] = []
    for at in (0, 1000):
        ids = iter(range(10 * at + 1, 10 * at + 9))
        events.append(event("user_annotation", f"ProfilerStep#{at}", at, 1000))
        events.append(event("user_annotation", "Optimizer.step#AdamW.step", at + 600, 100))
        for name, host, start, length, stream in (
            (POINTWISE, 10, 20, 100, 7), (PRODUCT, 100, 200, 200, 7),
            (POINTWISE, 110, 210, 20, 8), (POINTWISE, 620, 630, 50, 7),
        ):  # fmt: skip
            number = next(ids)
            events += [
                launch(at + host, number),
                kernel(name, at + start, length, launch=number, stream=stream),
            ]
    return trace(*events, *more)


def test_what_each_change_must_leave(tmp_path: Path) -> None:
    times = read_device_time(write(tmp_path / "t.json", two_steps()))
    assert times.steps == 2 and times.step == pytest.approx(1000e-6)
    assert times.busy == pytest.approx(350e-6)  # work beside the product counts once
    assert times.pointwise == pytest.approx(120e-6)
    assert times.optimizer == pytest.approx(50e-6)
    assert times.without_compile == pytest.approx(250e-6)
    assert times.without_optimizer == pytest.approx(300e-6)
    assert times.without_both == pytest.approx(200e-6)
    assert times.obstacle == ""


def around_products(*names: str) -> list[dict[str, Any]]:
    """Operators around the launches of the product and of the work beside it."""
    return [event("cpu_op", name, at + 95, 20) for at in (0, 1000) for name in names]


@pytest.mark.parametrize(
    ("operators", "kind"),
    [
        (["aten::convolution", "aten::cudnn_convolution"], "convolutions"),
        (["aten::_softmax", "aten::bmm"], "attention of single operators"),
        (["aten::_softmax"], ""),
        (["aten::_cudnn_rnn"], "recurrent layers"),
    ],
)
def test_work_that_may_run_in_another_way_keeps_no_time(
    operators: list[str], kind: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "t.json", two_steps(*around_products(*operators)))
    times = read_device_time(path)
    assert times.obstacle == "" and set(times.movable) == ({kind} if kind else set())
    if kind:
        assert times.movable[kind] == pytest.approx(200e-6)  # 20 of them beside the product
        assert times.without_compile == pytest.approx(50e-6)
        assert times.without_both == 0 and times.without_optimizer == pytest.approx(300e-6)


def test_products_that_a_compiler_pads_keep_no_time(tmp_path: Path) -> None:
    events = two_steps()
    for number, one in enumerate(e for e in events["traceEvents"] if e["name"] == PRODUCT):
        one["args"]["External id"] = 50 + number
    times = read_device_time(write(tmp_path / "t.json", events), [50, 51])
    assert times.movable == {PADDED: pytest.approx(200e-6)} and times.obstacle == ""
    assert times.without_compile == pytest.approx(50e-6)
    times = read_device_time(write(tmp_path / "t.json", events), [50])
    assert times.movable == {PADDED: pytest.approx(100e-6)}  # in one of two steps


def test_products_with_vectors_keep_no_time(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", two_steps(*around_products("aten::mv")))
    times = read_device_time(path)
    assert times.movable == {PADDED: pytest.approx(200e-6)} and times.obstacle == ""
    assert times.without_compile == pytest.approx(50e-6)


def test_a_closure_of_an_optimiser_is_no_work_of_its_step(tmp_path: Path) -> None:
    """As Lightning steps: forward and backward passes in ``optimizer.step(closure)``."""
    more = []
    for at in (0, 1000):
        more.append(event("user_annotation", "Optimizer.step#AdamW.step", at + 5, 700))
        name = "autograd::engine::evaluate_function: MmBackward0"
        more += [{**event("cpu_op", name, at + start, 20), "tid": 2} for start in (500, 520)]
    times = read_device_time(write(tmp_path / "t.json", two_steps(*more)))
    assert times.pointwise == pytest.approx(120e-6) and times.optimizer == pytest.approx(50e-6)
    assert times.without_compile == pytest.approx(250e-6)
    assert times.without_optimizer == pytest.approx(300e-6)


@pytest.mark.parametrize(
    ("operators", "padded", "reason"),
    [
        (["CheckpointFunctionBackward"], [], "recomputed activations"),
        (["aten::convolution"], [], "which kernels are convolutions"),
        (["aten::mm"], [7], "which kernels are products"),
    ],
)
def test_work_that_the_trace_does_not_show_leaves_no_bound(
    operators: list[str], padded: list[int], reason: str, tmp_path: Path
) -> None:
    calls = [event("cpu_op", name, 5, 3) for name in operators]  # no launch in them
    times = read_device_time(write(tmp_path / "t.json", two_steps(*calls)), padded)
    assert reason in times.obstacle


@pytest.mark.parametrize("model", ["bert", "gpt", "resnet"])
def test_times_of_recorded_traces_agree_with_their_timelines(model: str) -> None:
    path = H200 / f"{model}.json.gz"
    times = read_device_time(path)
    [timeline] = build_timelines(read_kineto(path))
    parts = timeline.parts
    busy = sum(seconds for part, seconds in parts.items() if not part.startswith("idle"))
    assert times.busy == pytest.approx(busy, rel=1e-6)
    work = parts["compute"] + parts["data"]
    assert times.without_both + sum(times.movable.values()) >= 0.98 * work
    assert times.without_both <= 1.02 * work
    assert times.without_both <= times.without_compile <= times.busy <= times.step
    assert times.obstacle == ""
    assert list(times.movable) == (["convolutions"] if model == "resnet" else [])


def test_a_trace_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    raw: dict[str, Any] = {"trace_file": None, "trace_obstacle": "no room", "padded": []}
    assert traced(raw) == {"obstacle": "no room"}
    path = write(tmp_path / "t.json", trace(kernel(PRODUCT, 0, 5)))
    assert "no step is recorded" in traced({**raw, "trace_file": str(path)})["obstacle"]
    with pytest.raises(BadTrace):
        read_device_time(path)
    path.write_text("{")
    assert "cannot be used" in traced({**raw, "trace_file": str(path)})["obstacle"]
