"""Edges of the span, causes of idle time, gaps that occur once, ranking of all parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.workload.timeline.analysis import OtherIdle, Timeline, build_timelines
from nostall.workload.timeline.bottlenecks import Bottleneck, find_bottlenecks
from nostall.workload.traces.kineto.reader import read_kineto
from tests.unit.workload.trace_events import Event, event, kernel, launch, trace, write

GEMM, ADD = "ampere_sgemm_128x64_nn", "at::native::vectorized_elementwise_kernel<4>"
LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def step(number: int, start: float, duration: float, **fields: Any) -> Event:
    return {**event("user_annotation", f"ProfilerStep#{number}", start, duration), **fields}


def loading(start: float, duration: float, **fields: Any) -> Event:
    return {**event("user_annotation", LOADER, start, duration), **fields}


def timelines(tmp_path: Path, *events: Event) -> list[Timeline]:
    return build_timelines(read_kineto(write(tmp_path / "t.json", trace(*events))))


def microseconds(timeline: Timeline) -> dict[str, float]:
    return {k: round(v * 1e6, 3) for k, v in timeline.parts.items() if v > 1e-12}


def rows(timeline: Timeline) -> dict[str, Bottleneck]:
    return {row.problem.split(" (")[0]: row for row in find_bottlenecks(timeline)}


def late(start: float, correlation: int, duration: float = 100) -> list[Event]:
    """A launch of 5 us and its kernel, which begins 10 us after the launch call."""
    return [
        launch(start, correlation, 5),
        kernel(GEMM, start + 10, duration, launch=correlation),
    ]


def cycle(first: int, start: float, count: int = 20) -> list[Event]:
    """Kernels of 10 us, 12 us apart, each launched 1 us before its predecessor ends."""
    return [
        one
        for n in range(count)
        for one in (
            launch(start + 12 * n - 3, first + n),
            kernel(ADD, start + 12 * n, 10, launch=first + n),
        )
    ]


# Edges of the span


def test_the_wait_for_the_data_of_a_single_step_is_in_its_span(tmp_path: Path) -> None:
    [timeline] = timelines(
        tmp_path,
        step(5, 1000, 1000),
        loading(1005, 600),
        launch(1620, 1, 5),
        kernel(GEMM, 1640, 300, launch=1),
    )
    assert timeline.span == pytest.approx(1000e-6)
    assert microseconds(timeline) == {"compute": 300, "idle_input": 600, "idle_launch": 100}


def test_the_span_ends_with_the_gpu_work_of_the_last_step_and_not_later_work(
    tmp_path: Path,
) -> None:
    [timeline] = timelines(
        tmp_path,
        *late(900, 1, 200),  # launched before the first step, and runs into it
        step(1, 1000, 100),
        step(2, 1100, 100),
        launch(1050, 2), kernel(GEMM, 1110, 50, launch=2),
        launch(1190, 3), kernel(GEMM, 1195, 200, launch=3),  # the host runs ahead
        launch(1500, 4), kernel(GEMM, 1510, 40, launch=4),   # behind the steps
    )  # fmt: skip
    assert timeline.steps == 2
    assert timeline.span == pytest.approx(395e-6)
    assert microseconds(timeline)["compute"] == 110 + 50 + 200
    outside, early = timeline.remarks
    assert outside.startswith("1 GPU event (0.040 ms) is outside the recorded steps")
    assert early.startswith("1 GPU event (0.110 ms) is of work that was launched before")


def test_a_step_that_ends_after_the_gpu_work_is_in_the_span_to_its_end(tmp_path: Path) -> None:
    [timeline] = timelines(tmp_path, step(1, 0, 500), *late(0, 1), loading(120, 380))
    assert timeline.span == pytest.approx(500e-6)
    assert microseconds(timeline) == {"compute": 100, "idle_launch": 20, "idle_input": 380}


def test_a_trace_without_steps_says_which_edges_it_has(tmp_path: Path) -> None:
    [timeline] = timelines(tmp_path, *late(0, 1))
    assert timeline.steps == 0 and timeline.edges.startswith("no step is recorded")
    [outside] = timelines(tmp_path, step(1, 5000, 100), *late(0, 1))
    assert outside.steps == 0 and outside.edges.startswith("no GPU event is in the recorded steps")


def test_each_gpu_has_the_steps_of_the_process_that_launches_its_work(tmp_path: Path) -> None:
    def of(pid: int, device: int, shift: float) -> list[Event]:
        call, work = late(shift + 300, 10 * pid)
        work["args"]["device"] = device
        return [
            step(1, shift, 500, pid=pid),
            loading(shift, 200, pid=pid),
            {**call, "pid": pid},
            work,
        ]

    first, second = timelines(tmp_path, *of(1, 0, 0), *of(2, 1, 4000))
    for timeline in (first, second):
        assert timeline.span == pytest.approx(500e-6) and timeline.steps == 1
        assert microseconds(timeline)["idle_input"] == 200


def test_equal_correlation_ids_mean_the_last_call_before_the_activity(tmp_path: Path) -> None:
    [timeline] = timelines(tmp_path, *late(0, 1), *late(1000, 1))
    assert microseconds(timeline) == {"compute": 200, "idle_launch": 900}


# Causes


def test_a_cause_gets_the_time_that_it_covers(tmp_path: Path) -> None:
    [timeline] = timelines(
        tmp_path,
        *late(0, 1),
        event("cuda_runtime", "cudaStreamSynchronize", 50, 126),  # 66 us of the gap
        *late(900, 2),
    )
    assert microseconds(timeline) == {"compute": 200, "idle_sync": 66, "idle_launch": 734}


def test_a_wait_behind_the_launch_is_not_its_cause(tmp_path: Path) -> None:
    wait = event("cuda_runtime", "cudaDeviceSynchronize", 907, 500)
    [timeline] = timelines(tmp_path, *late(0, 1), *late(900, 2), wait)
    assert "idle_sync" not in microseconds(timeline)


def test_a_thread_that_only_watches_the_gpu_delays_no_launch(tmp_path: Path) -> None:
    watch = {**event("cuda_runtime", "cudaEventSynchronize", 120, 700), "tid": 99}
    [timeline] = timelines(tmp_path, *late(0, 1), watch, *late(900, 2))
    assert microseconds(timeline) == {"compute": 200, "idle_launch": 800}


@pytest.mark.parametrize("what", ["cudaEventSynchronize", LOADER])
def test_the_wait_of_another_thread_delays_no_launch_before_its_end(
    tmp_path: Path, what: str
) -> None:
    category = "user_annotation" if what == LOADER else "cuda_runtime"
    main = [one for n in range(5) for one in late(200 * n, n + 1)]
    copier = [
        {**launch(20, 9), "tid": 8},
        event("gpu_memcpy", "Memcpy DtoH", 60, 5, device=0, stream=9, correlation=9),
        {**event(category, what, 25, 860), "tid": 8},
    ]
    (timeline,) = timelines(tmp_path, *main, *copier)
    # The last launch is at 800 us, before the wait ends.
    assert microseconds(timeline) == {"compute": 500, "idle_launch": 400}


def test_many_allocations_in_a_gap_are_host_work_and_not_launches(tmp_path: Path) -> None:
    names = ["cudaFree", "cudaFree", "cudaMalloc"]
    steps = [
        [
            step(n, 1000 * n, 1000),
            *late(1000 * n, 2 * n + 1),
            *(event("cuda_runtime", c, 1000 * n + 120 + 200 * i, 199) for i, c in enumerate(names)),
            *late(1000 * n + 720, 2 * n + 2, 270),
        ]
        for n in range(3)
    ]
    (timeline,) = timelines(tmp_path, *(one for events in steps for one in events))
    parts = {"compute": 1110, "idle_host": 1791, "idle_launch": 99}
    assert microseconds(timeline) == parts


def test_a_copy_that_is_not_asynchronous_waits(tmp_path: Path) -> None:
    copy = [
        event("cuda_runtime", "hipMemcpyWithStream", 20, 130, correlation=2),
        event("gpu_memcpy", "CopyDeviceToHost", 110, 5, device=0, stream=9, correlation=2),
    ]
    (timeline,) = timelines(tmp_path, *late(0, 1), *copy, *late(190, 3))
    parts = {"compute": 200, "copies": 5, "idle_sync": 35, "idle_launch": 50}
    assert microseconds(timeline) == parts


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("cudaMemcpyFromSymbol", "idle_sync"),
        ("cuMemcpy2D_v2", "idle_sync"),
        ("cudaMemcpy_ptds", "idle_sync"),
        ("cuMemcpyDtoD_v2", "idle_host"),
        ("cudaMemcpyPeer", "idle_host"),
        ("cudaMemcpy2DAsync_ptsz", "idle_host"),
    ],
)
def test_copies_that_wait_by_their_names(tmp_path: Path, name: str, part: str) -> None:
    copy = event("cuda_runtime", name, 105, 150, correlation=9)
    (timeline,) = timelines(tmp_path, *late(0, 1), copy, *late(300, 2))
    assert microseconds(timeline) == {"compute": 200, part: 145, "idle_launch": 55}


def every_step(*extra: Event) -> list[Event]:
    """Four steps of 1000 us: a kernel to 210 us, one from 830 to 930 us, and ``extra`` events."""
    return [
        {**one, "ts": one["ts"] + 1000 * n}
        for n in range(4)
        for one in (step(n, 0, 1000), *late(0, 10 + n, 200), *late(820, 50 + n), *extra)
    ]


def test_python_frames_name_what_the_host_does_in_a_gap(tmp_path: Path) -> None:
    frames = [
        event("python_function", "train.py(9): train", 0, 1000),
        event("python_function", "train.py(3): load", 214, 602),
        event("python_function", "<built-in function sleep>", 215, 600),
        event("python_function", "<built-in function len>", 300, 49),  # too short to be kept
    ]
    (timeline,) = timelines(tmp_path, *every_step(*frames))
    assert microseconds(timeline)["idle_host"] == 4 * 602
    name, seconds = timeline.longest_calls["idle_host"]
    assert name == "<built-in function sleep>" and seconds == pytest.approx(2400e-6)
    assert timeline.silent_seconds == 0 and len(timeline.recording.host.start) == 12


def test_a_gap_without_a_host_call_is_called_uncertain(tmp_path: Path) -> None:
    (timeline,) = timelines(tmp_path, *every_step())
    assert timeline.silent_seconds == pytest.approx(4 * (820 - 210) * 1e-6)
    row = rows(timeline)["the GPU waits for launches"]
    assert "cause uncertain: the trace has no host call in 2.440 ms" in row.problem
    assert "with_stack=True" in row.remedy
    (busy,) = timelines(tmp_path, *every_step(*(launch(t, -1, 90) for t in range(210, 810, 90))))
    assert busy.silent_seconds == 0 and "uncertain" not in str(rows(busy))


def test_a_wait_is_not_named_as_the_longest_call_of_launches(tmp_path: Path) -> None:
    own = event("hip_runtime", "hipStreamSynchronize", 20, 180)
    (timeline,) = timelines(tmp_path, *late(0, 1), own, *late(250, 2))
    assert microseconds(timeline) == {"compute": 200, "idle_sync": 90, "idle_launch": 60}
    assert "idle_launch" not in timeline.longest_calls
    other = {**launch(300, 2), "tid": 8}
    wait = event("cuda_runtime", "cudaDeviceSynchronize", 20, 380)
    events = [*late(0, 1), wait, other, kernel(GEMM, 310, 100, launch=2)]
    (timeline,) = timelines(tmp_path, *events)
    assert timeline.longest_calls == {}
    assert timeline.silent_seconds == pytest.approx(190e-6)


def test_id_zero_of_several_calls_launches_nothing(tmp_path: Path) -> None:
    marks = [event("cuda_runtime", "cudaGetDevice", t, 5, correlation=0) for t in (150, 290)]
    (timeline,) = timelines(tmp_path, *late(0, 1), *marks, kernel(GEMM, 300, 100, launch=0))
    assert microseconds(timeline) == {"compute": 200, "idle_other": 190}
    (timeline,) = timelines(tmp_path, *late(0, 0), *late(200, 1))  # ids that begin with 0
    assert microseconds(timeline) == {"compute": 200, "idle_launch": 100}


def test_a_step_in_a_step_is_not_counted(tmp_path: Path) -> None:
    marks = [step(1, 0, 500), step(1, 1, 498), step(2, 500, 500), step(2, 500, 500)]
    (timeline,) = timelines(tmp_path, *marks, *late(0, 1), *late(600, 2))
    assert (timeline.steps, timeline.span) == (2, pytest.approx(1e-3))


def test_a_long_host_call_without_a_launch_is_named_and_is_not_launch(tmp_path: Path) -> None:
    [timeline] = timelines(
        tmp_path,
        *late(0, 1),
        loading(120, 1),
        event("cpu_op", "aten::python_work", 130, 470),
        event("cpu_op", "aten::mm", 601, 10),
        *late(605, 2),
    )
    assert microseconds(timeline) == {
        "compute": 200, "idle_input": 1, "idle_host": 470, "idle_launch": 34,
    }  # fmt: skip
    work = rows(timeline)["the GPU waits for other work of the host"]
    assert "aten::python_work, 0.470 ms" in work.problem
    assert work.recoverable_seconds == pytest.approx(470e-6)


def test_the_operator_that_launches_is_launch(tmp_path: Path) -> None:
    [timeline] = timelines(
        tmp_path, *late(0, 1), event("cpu_op", "aten::mm", 200, 800), *late(900, 2)
    )
    assert microseconds(timeline) == {"compute": 200, "idle_launch": 800}
    assert "aten::mm" in find_bottlenecks(timeline)[0].problem


def test_queued_work_that_does_not_begin_is_not_a_late_launch(tmp_path: Path) -> None:
    """The GPU still runs work of an earlier step that is not recorded."""
    ahead = [e for n in range(20) for e in (launch(20 + 4 * n, 10 + n),)]
    work = [kernel(GEMM, 3000 + 10 * n, 10, launch=10 + n) for n in range(20)]
    [timeline] = timelines(tmp_path, step(1, 0, 100), *ahead, *work)
    assert microseconds(timeline) == {"compute": 200, "idle_launch": 22, "idle_other": 2978}
    assert timeline.other[OtherIdle.QUEUED] == pytest.approx(2978e-6)


def test_gaps_in_a_graph_and_before_events_without_a_launch_have_rows(tmp_path: Path) -> None:
    graph = event("cuda_runtime", "cudaGraphLaunch", 0, 30, correlation=9)
    nodes = [kernel(ADD, 40 + 25 * n, 20, launch=9) for n in range(20)]
    [timeline] = timelines(tmp_path, graph, *nodes)
    row = rows(timeline)["gaps between the kernels of a CUDA graph"]
    assert row.seconds == pytest.approx(95e-6) and row.max_speedup is None
    [unknown] = timelines(tmp_path, *(kernel(ADD, 40 + 25 * n, 20) for n in range(20)))
    row = rows(unknown)["the GPU is idle before work without a recorded launch"]
    assert row.seconds == pytest.approx(95e-6)
    assert unknown.remarks[0].startswith("20 of 20 GPU events have no recorded launch; 0.095 ms")


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("cudaGraphLaunch", OtherIdle.GRAPH),
        ("cuGraphLaunch", OtherIdle.GRAPH),
        ("hipGraphLaunch", OtherIdle.GRAPH),
        ("urEnqueueCommandBufferExp", OtherIdle.GRAPH),
        ("cudaMemcpyPeerAsync", OtherIdle.QUEUED),
        ("cudaLaunchKernelExC", OtherIdle.QUEUED),
    ],
)
def test_only_a_call_that_launches_a_graph_makes_its_activities_a_graph(
    tmp_path: Path, call: str, reason: OtherIdle
) -> None:
    once = event("cuda_runtime", call, 0, 5, correlation=9)
    works = [kernel(ADD, 40 + 100 * n, 50, launch=9) for n in range(2)]
    [timeline] = timelines(tmp_path, once, *works)
    assert timeline.other[reason] == pytest.approx(50e-6)
    assert sum(timeline.other.values()) == pytest.approx(50e-6)


@pytest.mark.parametrize("name", ["hipModuleLaunchKernel", "hipExtModuleLaunchKernel"])
def test_launches_of_rocm_load_no_module(tmp_path: Path, name: str) -> None:
    """Launches of 14 us, each of which the GPU waits for, are no gaps that occur once."""
    events = []
    for n in range(10):
        events.append(event("cuda_runtime", name, 30 * n, 14, correlation=n))
        events.append(kernel(ADD, 30 * n + 16, 10, launch=n))
    [timeline] = timelines(tmp_path, *events)
    assert microseconds(timeline) == {"memory": 100, "idle_launch": 180}
    assert timeline.longest_calls == {}  # no call runs before a launch


def test_the_calls_of_another_process_are_not_what_delays_a_launch(tmp_path: Path) -> None:
    other = [{**event("cpu_op", "aten::other", 120, 700), "pid": 9}]
    other += [{**late(100, 9)[0], "pid": 9}, {**kernel(ADD, 110, 5, launch=9, device=1), "pid": 9}]
    first, _ = timelines(tmp_path, *late(0, 1), *late(900, 2), *other)
    assert microseconds(first) == {"compute": 200, "idle_launch": 800}
    assert first.longest_calls == {}


def test_external_ids_link_launches_of_traces_without_correlation_ids(tmp_path: Path) -> None:
    events = []
    for n in range(4):
        call, work = late(160 * n, -1)
        call["args"] = work["args"] | {"External id": 100 + n}
        work["args"] = dict(call["args"])
        del call["args"]["correlation"], work["args"]["correlation"]
        events += [call, work]
    [timeline] = timelines(tmp_path, *events)
    assert microseconds(timeline) == {"compute": 400, "idle_launch": 180}
    assert timeline.remarks == ()


# Gaps that occur once


def test_a_first_launch_is_named_and_in_no_bound(tmp_path: Path) -> None:
    cold = [launch(246, 900, 100_000), kernel("cudnn_conv_fprop", 100_250, 10, launch=900)]
    [timeline] = timelines(tmp_path, *cycle(1, 10), *cold, *cycle(100, 100_300))
    [gap] = timeline.single_gaps
    assert gap.call == "cudaLaunchKernel" and gap.seconds == pytest.approx(100_002e-6)
    assert gap.start == pytest.approx(238e-6)
    first = find_bottlenecks(timeline)[0]
    assert first.problem.startswith("gaps that occur once (100.002 ms at 0.238 ms in cudaLaunch")
    assert first.max_speedup is None
    assert all(
        row.max_speedup is None or row.max_speedup < 1.1 for row in find_bottlenecks(timeline)
    )


def test_allocations_of_a_cold_start_are_in_no_bound(tmp_path: Path) -> None:
    events = cycle(1, 10)
    for n in range(5):
        start = 300 + 5000 * n
        events += [
            event("cuda_runtime", "cudaMalloc", start, 4000),
            *cycle(100 * n + 100, start + 4010),
        ]
    [timeline] = timelines(tmp_path, *events)
    assert len(timeline.single_gaps) == 5
    assert {gap.call for gap in timeline.single_gaps} == {"cudaMalloc"}
    assert timeline.parts["idle_host"] == 0


def test_a_long_gap_of_every_step_recurs(tmp_path: Path) -> None:
    events = []
    for n in range(4):
        start = 10_000 * n
        events += [step(n, start, 10_000), *cycle(100 * n, start + 5_000)]
    [timeline] = timelines(tmp_path, *events)
    assert timeline.single_gaps == () and timeline.parts["idle_once"] == 0
    [checkpoint] = timelines(
        tmp_path, *events[:-41], step(9, 30_000, 500_000), *cycle(900, 500_000)
    )
    assert [round(gap.seconds * 1e3) for gap in checkpoint.single_gaps] == [475]


def test_every_part_of_the_span_has_a_row(tmp_path: Path) -> None:
    [timeline] = timelines(
        tmp_path,
        *late(0, 1),
        kernel("ncclDevKernel_AllReduce", 110, 50, launch=1),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 160, 50, device=0, stream=9),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 210, 50, device=0, stream=9),
        kernel(ADD, 280, 30),
        loading(310, 100),
        event("cuda_runtime", "cudaDeviceSynchronize", 410, 60),
        event("cpu_op", "aten::host", 470, 300),
        *late(790, 7),
    )  # fmt: skip
    assert sum(row.seconds for row in find_bottlenecks(timeline)) == pytest.approx(timeline.span)


# Properties


times = st.integers(0, 400)
spans = st.tuples(times, st.integers(0, 60))
threads = st.integers(1, 3)
how_launched = st.sampled_from(["launch", "graph", "none"])
recorded = st.fixed_dictionaries({
    "work": st.lists(st.tuples(times, st.integers(0, 40), how_launched,
                               st.integers(0, 80), st.integers(0, 20), threads),
                     min_size=1, max_size=12),
    "loading": st.lists(st.tuples(spans, threads), max_size=4),
    "syncs": st.lists(st.tuples(spans, threads), max_size=4),
    "operators": st.lists(st.tuples(spans, threads), max_size=8),
    "steps": st.lists(spans, max_size=3),
})  # fmt: skip


def random_trace(rows: dict[str, Any], scale: int = 1, shift: int = 0) -> list[Event]:
    def place(one: Event) -> Event:
        return {**one, "ts": one["ts"] * scale + shift, "dur": one["dur"] * scale}

    events = [step(n, s, d) for n, (s, d) in enumerate(rows["steps"])]
    events += [loading(s, d, tid=t) for (s, d), t in rows["loading"]]
    events += [
        {**event("cuda_runtime", "cudaDeviceSynchronize", s, d), "tid": t}
        for (s, d), t in rows["syncs"]
    ]
    events += [
        {**event("cpu_op", f"aten::op{s % 3}", s, d), "tid": t} for (s, d), t in rows["operators"]
    ]
    for number, (start, length, how, lead, call, thread) in enumerate(rows["work"]):
        correlation = 7 if how == "graph" else 100 + number
        events.append(kernel(GEMM, start, length, launch=correlation))
        if how != "none":
            events.append({**launch(start - lead, correlation, call), "tid": thread})
    return [place(one) for one in events]


def covered(pairs: list[tuple[tuple[int, int], int]]) -> int:
    return len({t for (start, length), _ in pairs for t in range(start, start + length)})


@settings(deadline=None)
@given(recorded, st.integers(2, 50), st.integers(0, 10**6))
def test_parts_sum_and_no_cause_gets_more_than_its_own_time(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[str, Any], scale: int, shift: int
) -> None:
    folder = tmp_path_factory.mktemp("t")
    try:
        [timeline] = timelines(folder, *random_trace(rows))
    except BadTrace:
        return
    parts = timeline.parts
    assert sum(parts.values()) == pytest.approx(timeline.span, rel=1e-9)
    assert min(parts.values()) >= 0
    assert parts["idle_input"] <= covered(rows["loading"]) * 1e-6 * (1 + 1e-9)
    assert parts["idle_sync"] <= covered(rows["syncs"]) * 1e-6 * (1 + 1e-9)
    assert parts["idle_host"] <= covered(rows["operators"]) * 1e-6 * (1 + 1e-9)
    assert sum(timeline.other.values()) == pytest.approx(parts["idle_other"])
    assert sum(gap.seconds for gap in timeline.single_gaps) == pytest.approx(parts["idle_once"])
    [moved] = timelines(folder, *random_trace(rows, scale, shift))
    for part, seconds in parts.items():
        assert moved.parts[part] / moved.span == pytest.approx(seconds / timeline.span, abs=1e-6), (
            part
        )
