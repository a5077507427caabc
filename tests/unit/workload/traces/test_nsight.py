"""Reading of the SQLite exports of Nsight Systems: tables, versions, missing and damaged parts."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from nostall.core import BadTrace
from nostall.workload.timeline.analysis import Timeline, build_timelines
from nostall.workload.traces.nsight import is_sqlite, read_nsight
from tests.unit.workload.traces.nsight_export import PROCESS, THREAD, Export

GEMM = "ampere_sgemm_128x64_nn"


def timeline_of(path: Path) -> Timeline:
    [timeline] = build_timelines(read_nsight(path))
    return timeline


def microseconds(timeline: Timeline) -> dict[str, float]:
    return {k: round(v * 1e6, 3) for k, v in timeline.parts.items() if v > 1e-12}


def one_step() -> Export:
    export = Export()
    export.range("step 5", 1000, 1000)
    export.range("data_loading", 1005, 600)
    export.launch(1620, 1)
    export.kernel(GEMM, 1640, 300, 1)
    export.tables["TARGET_INFO_GPU"] = [{"id": 0, "name": "NVIDIA H200"}]
    return export


def test_steps_waits_launches_and_kernels(tmp_path: Path) -> None:
    path = one_step().write(tmp_path / "t.sqlite")
    assert is_sqlite(path) and not is_sqlite(tmp_path / "absent")
    timeline = timeline_of(path)
    assert timeline.steps == 1 and timeline.recording.gpu == "NVIDIA H200"
    assert microseconds(timeline) == {"compute": 300, "idle_input": 600, "idle_launch": 100}
    assert timeline.recording.host_names == ("cudaLaunchKernel",)
    assert timeline.remarks == ()


def test_copies_memsets_and_graphs(tmp_path: Path) -> None:
    export = one_step()
    work = {"globalPid": PROCESS, "deviceId": 0, "contextId": 1, "streamId": 9, "correlationId": 8}
    export.add("CUPTI_ACTIVITY_KIND_MEMCPY", 1000, 20, **work, bytes=4096, copyKind=1)
    export.add("CUPTI_ACTIVITY_KIND_MEMCPY", 1030, 10, **work, bytes=4096, copyKind=2)
    export.add("CUPTI_ACTIVITY_KIND_MEMSET", 1050, 5, **work, bytes=16)
    export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 1060, 40, **work, graphId=3)
    timeline = timeline_of(export.write(tmp_path / "t.sqlite"))
    parts = microseconds(timeline)
    assert (parts["data"], parts["copies"], parts["memory"]) == (20, 10, 45)
    assert "CUDA graph 3" in timeline.recording.names
    assert (
        "1 launch of CUDA graphs is recorded without their kernels" in timeline.recording.remarks[0]
    )


def test_equal_correlation_ids_of_two_processes_are_different_calls(tmp_path: Path) -> None:
    other = 6 << 24 | 1 << 56
    export = Export()
    for process, shift in ((PROCESS, 0), (other, 300)):
        export.launch(shift, 1, process)
        export.kernel(GEMM, shift + 10, 100, 1, process)
    timeline = timeline_of(export.write(tmp_path / "t.sqlite"))
    assert timeline.recording.calls.correlation[0] != timeline.recording.calls.correlation[1]
    assert microseconds(timeline) == {"compute": 200, "idle_launch": 200}


@pytest.mark.parametrize("is_mapped", [True, False])
def test_processes_that_see_one_gpu_each_have_timelines_of_their_own(
    tmp_path: Path, is_mapped: bool
) -> None:
    """With CUDA_VISIBLE_DEVICES, the only GPU that a process sees is its GPU 0."""
    export = Export()
    for number in (5, 6):
        export.launch(20 * number, 1, number << 24)
        export.kernel(GEMM, 20 * number + 10, 100, 1, number << 24)
    if is_mapped:
        export.tables["TARGET_INFO_CUDA_DEVICE"] = [
            {"gpuId": 3, "cudaId": 0, "pid": 5}, {"gpuId": 1, "cudaId": 0, "pid": 6},
        ]  # fmt: skip
    timelines = build_timelines(read_nsight(export.write(tmp_path / "t.sqlite")))
    assert [t.device for t in timelines] == ([1, 3] if is_mapped else [0])
    assert [microseconds(t)["compute"] for t in timelines] == ([100, 100] if is_mapped else [120])


def test_whole_graphs_are_no_chain_that_fusion_shortens(tmp_path: Path) -> None:
    export = one_step()
    for n in range(3):
        export.add("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", 1650 + 100 * n, 90, globalPid=PROCESS,
                   deviceId=0, contextId=1, streamId=9, correlationId=8 + n, graphId=4)  # fmt: skip
    timeline = timeline_of(export.write(tmp_path / "t.sqlite"))
    assert timeline.num_kernels == 4 and timeline.fusion_saving == 0


@pytest.mark.parametrize("table", ["CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "TARGET_INFO_GPU"])
def test_a_report_may_lack_any_table_but_that_of_its_work(tmp_path: Path, table: str) -> None:
    export = one_step()
    del export.tables[table]
    timeline = timeline_of(export.write(tmp_path / "t.sqlite"))
    assert microseconds(timeline)["compute"] == 300
    assert sum(timeline.parts.values()) == pytest.approx(timeline.span)


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "demangledName"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "contextId"),
        ("CUPTI_ACTIVITY_KIND_KERNEL", "correlationId"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "globalTid"),
        ("CUPTI_ACTIVITY_KIND_RUNTIME", "nameId"),
        ("NVTX_EVENTS", "textId"),
        ("NVTX_EVENTS", "eventType"),
        ("NVTX_EVENTS", "end"),
    ],
)
def test_versions_lack_columns(tmp_path: Path, table: str, column: str) -> None:
    export = one_step()
    for row in export.tables[table]:
        del row[column]
    timeline = timeline_of(export.write(tmp_path / "t.sqlite"))
    assert timeline.num_kernels == 1
    assert sum(timeline.parts.values()) == pytest.approx(timeline.span)
    if (table, column) == ("CUPTI_ACTIVITY_KIND_KERNEL", "globalPid"):
        assert timeline.remarks == ()  # ids without processes still match


def test_marks_and_open_ranges_are_no_ranges(tmp_path: Path) -> None:
    export = one_step()
    export.range("step 6", 5000, 0, eventType=34)
    export.range("step 7", 6000, 0, end=None)
    export.range("train_step", 0, 10, text="train_step", textId=None, globalTid=THREAD)
    assert len(read_nsight(export.write(tmp_path / "t.sqlite")).steps) == 2


def test_a_row_without_a_time_costs_itself(tmp_path: Path) -> None:
    export = one_step()
    export.kernel("late", 3000, 1, 99)
    export.tables["CUPTI_ACTIVITY_KIND_KERNEL"][-1]["end"] = None
    recording = read_nsight(export.write(tmp_path / "t.sqlite"))
    assert len(recording.activities) == 1
    assert recording.remarks == ("1 event without a valid start or duration is skipped",)


def test_other_and_damaged_databases_are_named(tmp_path: Path) -> None:
    def database(name: str, sql: str) -> Path:
        with sqlite3.connect(tmp_path / name) as one:
            one.execute(sql)
        one.close()
        return tmp_path / name

    with pytest.raises(BadTrace, match="without the tables of Nsight Systems"):
        read_nsight(database("other.sqlite", "CREATE TABLE t (a)"))
    with pytest.raises(BadTrace, match="a database of nvprof"):
        read_nsight(database("old.sqlite", "CREATE TABLE StringTable (a)"))
    with pytest.raises(BadTrace, match="recorded no GPU work; record with 'nsys profile"):
        read_nsight(database("empty.sqlite", "CREATE TABLE StringIds (id, value)"))
    cut = one_step().write(tmp_path / "cut.sqlite")
    cut.write_bytes(cut.read_bytes()[:5000])
    with pytest.raises(BadTrace, match="the SQLite database is damaged"):
        read_nsight(cut)
