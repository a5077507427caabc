"""Traces without categories: the names of processes and threads say what their events are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nostall.core import BadTrace
from nostall.workload.timeline.analysis import build_timelines
from nostall.workload.traces.host import read_host
from nostall.workload.traces.kineto.reader import read_kineto
from tests.unit.workload.trace_events import Event, write

HOST, GPU = 701, 1


def name(pid: int, text: str, tid: int | None = None, what: str = "") -> Event:
    kind = what or ("process_name" if tid is None else "thread_name")
    key = "labels" if kind == "process_labels" else "name"
    return {"ph": "M", "pid": pid, "tid": tid or 0, "name": kind, "args": {key: text}}


def at(pid: int, tid: int, text: str, start: float, duration: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": text,
        "ts": start,
        "dur": duration,
        "args": args,
    }


LANES = [
    name(HOST, "/host:CPU"), name(HOST, "python", 5),
    name(GPU, "/device:GPU:2"), name(GPU, "Stream #20(Compute)", 20),
    name(GPU, "Stream #21(MemcpyH2D)", 21), name(GPU, "XLA Ops", 30),
]  # fmt: skip
JAX = [
    at(HOST, 5, "train", 0, 1000, step_num="3"),
    at(HOST, 5, "$profiler.py:307 trace", 0, 1000),
    at(HOST, 5, "PjitFunction(f)", 500, 120),
    at(HOST, 5, "cuLaunchKernel", 610, 5, correlation_id="12"),
    at(GPU, 21, "MemcpyH2D", 100, 50, correlation_id="11"),
    at(GPU, 20, "gemm_fusion_dot_1", 640, 300, correlation_id="12", hlo_op="dot.1"),
    at(GPU, 30, "dot.1", 640, 300, hlo_op="dot.1"),
]


@pytest.mark.parametrize("order", ["before", "behind"])
def test_lanes_of_jax(tmp_path: Path, order: str) -> None:
    events = [*LANES, *JAX] if order == "before" else [*JAX, *LANES]
    recording = read_kineto(write(tmp_path / "t.json", {"traceEvents": events}))
    assert recording.remarks == () and recording.events == len(events)
    assert recording.activities.stream.tolist() == [21, 20]
    [timeline] = build_timelines(recording)
    assert (timeline.device, timeline.steps) == (2, 1)
    parts = {k: round(v * 1e6) for k, v in timeline.parts.items() if v > 1e-12}
    assert parts == {"compute": 300, "data": 50, "idle_launch": 550, "idle_other": 100}


def test_kineto_without_categories(tmp_path: Path) -> None:
    events = [
        name(9, "python"), name(9, "CPU", what="process_labels"), name(9, "thread 9 (python)", 9),
        name(0, "python"), name(0, "GPU 0", what="process_labels"), name(0, "stream 7 ", 7),
        at(9, 9, "ProfilerStep#1", 0, 100), at(9, 9, "aten::mm", 5, 10),
        at(9, 9, "cudaLaunchKernel", 8, 4, correlation=3),
        at(0, 7, "ampere_sgemm_128x64_nn", 20, 60, correlation=3, stream=7, device=0),
        at(0, 7, "Memset (Device)", 85, 2),
    ]  # fmt: skip
    [timeline] = build_timelines(read_kineto(write(tmp_path / "t.json", {"traceEvents": events})))
    assert timeline.steps == 1 and timeline.span == pytest.approx(100e-6)
    assert timeline.parts["compute"] == pytest.approx(60e-6)
    assert timeline.recording.host_names == ("aten::mm", "cudaLaunchKernel")


def test_work_without_a_device_is_on_the_gpu_that_its_process_stands_for(tmp_path: Path) -> None:
    labels = [name(pid, f"GPU {pid}", what="process_labels") for pid in (0, 3)]
    works = [
        at(pid, 7, "ampere_sgemm_128x64_nn", 10 * pid, 60, stream=7) | {"cat": "kernel"}
        for pid in (0, 3)
    ]
    path = write(tmp_path / "t.json", {"traceEvents": [*labels, *works]})
    timelines = build_timelines(read_kineto(path))
    assert [(t.device, round(t.span * 1e6)) for t in timelines] == [(0, 60), (3, 60)]


def test_lanes_of_rocprof(tmp_path: Path) -> None:
    events = [
        name(2, "CPU HIP API"), name(6, "GPU0"),
        at(2, 5, "hipLaunchKernel", 0, 5), at(6, 1, "Cijk_Ailk_Bljk_SB_MT128x128", 10, 40),
    ]  # fmt: skip
    [timeline] = build_timelines(read_kineto(write(tmp_path / "t.json", {"traceEvents": events})))
    assert timeline.parts["compute"] == pytest.approx(40e-6)


def test_events_on_unknown_lanes_are_counted(tmp_path: Path) -> None:
    events = [*LANES, *JAX, name(50, "/device:TPU:0"), at(50, 1, "fusion", 0, 9)]
    recording = read_kineto(write(tmp_path / "t.json", {"traceEvents": events}))
    [remark] = recording.remarks
    assert remark.startswith("1 event of unknown categories ('none, on lane /device:TPU:0')")
    alone = write(tmp_path / "a.json", {"traceEvents": [at(50, 1, "fusion", 0, 9)]})
    with pytest.raises(BadTrace, match="none, on lane"):
        read_host(alone)
