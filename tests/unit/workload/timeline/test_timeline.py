"""Timelines of small handmade traces: busy parts, causes of idle gaps, bottlenecks, roofline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.workload.jobs.record import Resource
from nostall.workload.timeline.analysis import TIME_PARTS, Timeline, build_timelines, slice_shares
from nostall.workload.timeline.bottlenecks import MIN_SHARE, find_bottlenecks
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.timeline.kernels import kernel_times
from nostall.workload.traces.kineto.reader import read_kineto
from nostall.workload.traces.work_kinds import WorkKind
from tests.unit.workload.job_records import TEST_HARDWARE
from tests.unit.workload.trace_events import Event, event, kernel, launch, trace, write

GEMM, ADD, NCCL = "ampere_sgemm_128x64_nn", "vectorized_elementwise_kernel", "ncclDevKernel_AllRed"


def make_timeline(tmp_path: Path, *events: Event) -> Timeline:
    [only] = build_timelines(read_kineto(write(tmp_path / "t.json", trace(*events))))
    return only


def microseconds(timeline: Timeline) -> dict[str, float]:
    return {k: round(v * 1e6, 3) for k, v in timeline.parts.items() if v > 1e-12}


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def covered_times(pairs: list[tuple[int, int]]) -> set[int]:
    return {t for start, length in pairs for t in range(start, start + length)}


def make_intervals(pairs: list[tuple[int, int]]) -> Intervals:
    start = np.array([s for s, _ in pairs], dtype=float)
    return Intervals.union(start, start + np.array([n for _, n in pairs], dtype=float))


@given(spans, spans, st.integers(0, 40), st.integers(1, 40))
def test_interval_operations_are_those_of_sets(a, b, low, width) -> None:
    first, second = make_intervals(a), make_intervals(b)
    assert first.length == len(covered_times(a))
    assert (first | second).length == len(covered_times(a) | covered_times(b))
    assert first.overlap(second) == len(covered_times(a) & covered_times(b))
    window = set(range(low, low + width))
    assert first.clip(low, low + width).length == len(covered_times(a) & window)
    assert first.gaps(low, low + width).length == len(window - covered_times(a))
    assert all(first.start[1:] > first.end[:-1])


def test_each_moment_counts_once_and_communication_last_of_the_kernels(
    tmp_path: Path,
) -> None:
    timeline = make_timeline(
        tmp_path,
        kernel(GEMM, 0, 10),
        kernel(ADD, 5, 10, stream=8),
        kernel(NCCL, 12, 10, stream=9),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 6, stream=10),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 25, 3, stream=10),
    )
    assert microseconds(timeline) == {
        "compute": 10, "memory": 5, "weights": 7, "data": 4, "copies": 2,
    }  # fmt: skip
    assert timeline.span == pytest.approx(28e-6)
    assert timeline.communication == pytest.approx(10e-6)
    assert timeline.overlap == pytest.approx(0.3)


def test_causes_of_idle_time(tmp_path: Path) -> None:
    timeline = make_timeline(
        tmp_path,
        launch(0, 1), kernel(ADD, 10, 10, launch=1),
        launch(5, 2), kernel(ADD, 23, 7, launch=2),      # launched before the gap: other
        launch(36, 3), kernel(ADD, 40, 10, launch=3),    # launched late: launch
        event("cuda_runtime", "cudaStreamSynchronize", 45, 10),
        launch(56, 4), kernel(ADD, 60, 10, launch=4),    # after a synchronisation: sync
        event("user_annotation", "enumerate(DataLoader)#_Next", 65, 10),
        launch(76, 5), kernel(ADD, 80, 10, launch=5),    # after the data loader: input
        kernel(ADD, 95, 5, launch=6),                    # launch not recorded: other
    )  # fmt: skip
    # A wait counts from the start of its gap to its end, the work of the host behind it as launch.
    assert microseconds(timeline) == {
        "memory": 52, "idle_other": 8, "idle_launch": 20, "idle_sync": 5, "idle_input": 5,
    }  # fmt: skip
    assert timeline.num_late_gaps == 3
    assert timeline.on_time_gap == pytest.approx(3e-6)


activity_rows = st.tuples(
    st.integers(0, 99), st.integers(0, 30), st.sampled_from(WorkKind), st.integers(0, 3)
)
"""(start, duration, kind of work, stream)."""


@given(st.lists(activity_rows, min_size=1, max_size=25))
def test_the_parts_sum_to_the_span(tmp_path_factory, rows) -> None:
    kernel_names = {WorkKind.COMPUTE: GEMM, WorkKind.MEMORY: ADD, WorkKind.COMMUNICATION: NCCL}
    events = [
        kernel(kernel_names[k], s, n, stream=q)
        if k in kernel_names
        else event(
            "gpu_memcpy", f"Memcpy {'HtoD' if k is WorkKind.INPUT else 'DtoH'}", s, n, stream=q
        )
        for s, n, k, q in rows
    ]
    path = write(tmp_path_factory.mktemp("t") / "t.json", trace(*events))
    if not any(n for _, n, _, _ in rows):
        with pytest.raises(BadTrace, match="duration 0"):
            build_timelines(read_kineto(path))
        return
    [timeline] = build_timelines(read_kineto(path))
    assert set(timeline.parts) == set(TIME_PARTS)
    assert sum(timeline.parts.values()) == pytest.approx(timeline.span)
    assert all(v >= -1e-15 for v in timeline.parts.values())
    assert 0 <= timeline.overlap <= 1 + 1e-9
    rows = find_bottlenecks(timeline)
    assert sum(row.seconds for row in rows) <= timeline.span * (1 + 1e-9)
    assert sum(row.seconds for row in rows) >= timeline.span * (1 - 13 * MIN_SHARE)
    for row in rows:
        assert (row.max_speedup is None) == (row.recoverable_seconds is None)
        if row.max_speedup is not None and row.recoverable_seconds is not None:
            assert row.max_speedup > 1
            assert row.recoverable_seconds <= timeline.span


def test_each_device_has_a_timeline(tmp_path: Path) -> None:
    two_gpus = trace(kernel(GEMM, 0, 10, device=0), kernel(ADD, 0, 20, device=1))
    timelines = build_timelines(read_kineto(write(tmp_path / "t.json", two_gpus)))
    assert [t.device for t in timelines] == [0, 1]
    assert [t.span for t in timelines] == pytest.approx([10e-6, 20e-6])


def test_the_span_starts_with_the_first_recorded_step(tmp_path: Path) -> None:
    timeline = make_timeline(
        tmp_path,
        kernel(ADD, 0, 50),
        event("user_annotation", "ProfilerStep#1", 100, 40),
        event("user_annotation", "ProfilerStep#2", 140, 40),
        kernel(GEMM, 110, 10),
        kernel(GEMM, 180, 20),  # ends after the step of the host
    )
    assert timeline.steps == 2
    assert timeline.span == pytest.approx(100e-6)
    assert timeline.parts["memory"] == 0


def test_bottlenecks_have_a_remedy_and_a_bound(tmp_path: Path) -> None:
    timeline = make_timeline(
        tmp_path,
        launch(0, 1), kernel(GEMM, 0, 50, launch=1),
        launch(1, 2), kernel(NCCL, 50, 30, launch=2),
        launch(81, 3), kernel(ADD, 85, 4, launch=3),
        launch(82, 4), kernel(ADD, 90, 10, launch=4),
    )  # fmt: skip
    bottlenecks = {b.problem: b for b in find_bottlenecks(timeline)}
    exposed = bottlenecks["communication that no computation hides"]
    assert exposed.remedy.startswith("nostall plan")
    assert exposed.max_speedup == pytest.approx(100 / 70)
    late = bottlenecks["the GPU waits for launches"]
    # Minus the gap before a launch in time.
    assert late.recoverable_seconds == pytest.approx((5 - 1) * 1e-6)
    unfused = bottlenecks["chains of memory-bound kernels"]
    assert unfused.remedy.startswith("torch.compile(model")
    assert unfused.recoverable_seconds == pytest.approx(4e-6)


def test_only_computation_can_hide_communication(tmp_path: Path) -> None:
    timeline = make_timeline(tmp_path, kernel(GEMM, 0, 10), kernel(NCCL, 10, 90))
    exposed, product = find_bottlenecks(timeline)
    assert product.max_speedup is None and product.seconds == pytest.approx(10e-6)
    assert exposed.seconds == pytest.approx(90e-6)
    assert exposed.max_speedup == pytest.approx(100 / 90)


def test_products_with_recorded_shapes_have_a_roofline_position(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    timeline = make_timeline(
        tmp_path,
        event("cpu_op", "aten::mm", 0, 1, **shapes, **{"External id": 5}),
        kernel(GEMM, 0, 400, **{"External id": 5}),
        kernel(ADD, 400, 100),
    )
    product, add = kernel_times(timeline, TEST_HARDWARE)
    assert product.roofline is not None
    assert product.roofline.bound == "compute"
    assert product.roofline.attained_share == pytest.approx(2e9 / 10e12 / 400e-6)
    assert (add.roofline, add.roofline_seconds) == (None, 0)
    slow_product, rest = find_bottlenecks(timeline, [product, add])
    assert rest.max_speedup is None and rest.seconds == pytest.approx(100e-6)
    assert slow_product.remedy.startswith("nostall tune")
    assert slow_product.max_speedup == pytest.approx(500 / 300)
    assert kernel_times(timeline)[0].roofline is None


def test_memory_bound_kernels_have_the_memory_roof_and_are_no_products(tmp_path: Path) -> None:
    shapes = {"Input Dims": [[1000, 1000], [1000, 1000]], "Input type": ["float", "float"]}
    timeline = make_timeline(
        tmp_path,
        event("cpu_op", "aten::add", 0, 1, **shapes, **{"External id": 5}),
        kernel(ADD, 0, 40, **{"External id": 5}),
    )
    [add] = kernel_times(timeline, TEST_HARDWARE)
    assert add.roofline is not None and add.roofline.bound == "memory"
    assert add.roofline.roof_seconds == pytest.approx(12e6 / TEST_HARDWARE.rate(Resource.MEMORY))
    assert not [b for b in find_bottlenecks(timeline, [add]) if "products" in b.problem]


def test_slices_sum_to_the_parts(tmp_path: Path) -> None:
    timeline = make_timeline(
        tmp_path,
        kernel(GEMM, 0, 33),
        kernel(ADD, 20, 30, stream=8),
        kernel(NCCL, 45, 20, stream=9),
        kernel(ADD, 80, 17),
    )
    shares = slice_shares(timeline, 7)
    assert shares.shape == (5, 7)
    seconds = shares.sum(axis=1) * timeline.span / 7
    busy_parts = ("compute", "memory", "weights", "data", "copies")
    assert seconds == pytest.approx([timeline.parts[part] for part in busy_parts])
    assert (shares.sum(axis=0) <= 1 + 1e-9).all()
