"""Reading of Kineto traces: boundaries of events, file formats, damage, skipped events."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.workload.traces import event_stream
from nostall.workload.traces.event_stream import TraceFile
from nostall.workload.traces.kineto import read_kineto
from tests.unit.workload.trace_events import event, kernel, launch, trace, write

GEMM = "ampere_sgemm_128x64_nn"


def read_all(path: Path) -> tuple[list[Any], TraceFile]:
    file = TraceFile(path)
    return [e for events in file.event_lists(msgspec.json.decode) for e in events], file


names = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs"]) | st.sampled_from('{}[],":\\ "'),
    max_size=12,
)
values = st.recursive(
    st.integers(-9, 9) | names | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=8,
)
events = st.lists(st.dictionaries(names, values, min_size=1, max_size=4), max_size=40)


@settings(max_examples=60, deadline=None)
@given(events, st.sampled_from([None, 0, 2]), st.integers(1, 400), st.booleans(), st.booleans())
def test_any_events_are_read_with_any_chunk_size(
    tmp_path_factory, expected, indent, chunk, packed, escaped
) -> None:
    """Brackets, quotes and commas inside names and nested lists do not move a boundary."""
    path = tmp_path_factory.mktemp("t") / ("t.json.gz" if packed else "t.json")
    frame = {"schemaVersion": 1, "traceEvents": expected, "tail": [{"a": "}, {"}, {"b": "]"}]}
    text = json.dumps(frame, indent=indent, ensure_ascii=escaped).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    default, event_stream.CHUNK = event_stream.CHUNK, chunk
    try:
        events_read, file = read_all(path)
    finally:
        event_stream.CHUNK = default
    assert events_read == expected
    assert file.damage is None
    assert json.loads(file.frame)["tail"] == frame["tail"]


@pytest.mark.parametrize("indent", [None, 0, 1])
def test_a_chunk_may_end_at_any_byte(tmp_path: Path, monkeypatch, indent: int | None) -> None:
    """Between two events, after a backslash, inside a number."""
    expected = [{"a": 1}, {"b": {"c": [-12, "}, {"]}}, {"\\": '"'}, {"": 0}]
    text = json.dumps({"traceEvents": expected, "tail": 1}, indent=indent)
    path = tmp_path / "t.json"
    path.write_text(text)
    for chunk in range(1, len(text) + 1):
        monkeypatch.setattr(event_stream, "CHUNK", chunk)
        events_read, file = read_all(path)
        assert (events_read, file.damage) == (expected, None), chunk


def test_a_bare_list_and_several_gzip_members_are_read(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare.json", [kernel("k", 0, 1)])
    assert len(read_kineto(bare).activities) == 1
    text = json.dumps(trace(kernel("k", 0, 1))).encode()
    members = tmp_path / "members.json.gz"
    members.write_bytes(gzip.compress(text[:60]) + gzip.compress(text[60:]))
    assert len(read_kineto(members).activities) == 1


def test_columns_and_metadata(tmp_path: Path) -> None:
    recorded = trace(
        event("user_annotation", "ProfilerStep#3", 90, 60),
        event("user_annotation", "enumerate(DataLoader)#_Next", 91, 4),
        event("cpu_op", "aten::mm", 92, 9, **MM_ARGUMENTS, **{"External id": 5}),
        launch(100, 11),
        event("cuda_runtime", "cudaDeviceSynchronize", 103, 7, correlation=12),
        kernel(GEMM, 120, 10, launch=11, **{"External id": 5}),
        kernel("ncclDevKernel_AllReduce", 140, 5, dtype="BFloat16", **{"In msg nelems": 1000}),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 110, 5, stream=9, bytes=4096),
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "x"}},
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 11, "ts": 100, "tid": 1},
        rank=3,
        world=8,
    )
    recording = read_kineto(write(tmp_path / "t.json.gz", recorded))
    assert (recording.rank, recording.world_size, recording.gpu) == (3, 8, "Test GPU")
    assert (recording.events, recording.unusable_events, recording.damage) == (10, 0, None)
    activities = recording.activities
    assert activities.start.tolist() == pytest.approx([0, 10e-6, 30e-6])
    assert activities.type.tolist() == [1, 0, 0]
    assert activities.copied_bytes.tolist() == [4096, 0, 0]
    assert activities.message_bytes.tolist() == [0, 0, 2000]
    assert activities.operator.tolist() == [-1, 5, -1]
    assert recording.calls.synchronizes.tolist() == [False, True]
    assert recording.steps == pytest.approx(np.array([[-20e-6, 40e-6]]))
    assert len(recording.loading) == 1
    assert recording.operator_costs[5].flops == 2 * 64 * 128 * 32
    assert recording.operator_costs[5].bytes_moved == 4 * (64 * 128 + 128 * 32 + 64 * 32)


MM_ARGUMENTS = {"Input Dims": [[64, 128], [128, 32]], "Input type": ["float", "float"]}


@pytest.mark.parametrize(
    ("operator", "shapes", "dtypes", "flops"),
    [
        ("aten::addmm", [[32], [64, 128], [128, 32], [], []], ["float"] * 3, 2 * 64 * 128 * 32),
        ("aten::bmm", [[4, 8, 16], [4, 16, 2]], ["c10::Half"] * 2, 2 * 4 * 8 * 16 * 2),
        ("aten::mm", [[64, 128], [64, 32]], ["float"] * 2, None),
        ("aten::mm", [[64, 128], [128, 32]], ["float", "double"], None),
        ("aten::mm", [[64, 128]], ["float"], None),
        ("aten::mm", [[64, -1], [-1, 32]], ["float"] * 2, None),
        ("aten::mm", "shapes", ["float"] * 2, None),
        ("aten::mm", [[64, 128], [128, 32]], ["long int"] * 2, None),
    ],
)
def test_flops_of_products_from_their_shapes(
    tmp_path: Path, operator: str, shapes: object, dtypes: object, flops: float | None
) -> None:
    args = {"Input Dims": shapes, "Input type": dtypes, "External id": 1}
    recorded = trace(event("cpu_op", operator, 0, 1, **args), kernel(GEMM, 1, 1))
    costs = read_kineto(write(tmp_path / "t.json", recorded)).operator_costs
    assert (costs[1].flops if costs else None) == flops


def test_a_correlation_id_as_external_id_is_not_an_operator(tmp_path: Path) -> None:
    recorded = trace(kernel(GEMM, 0, 1, launch=7, **{"External id": 7}))
    activities = read_kineto(write(tmp_path / "t.json", recorded)).activities
    assert activities.operator.tolist() == [-1]


def test_categories_of_old_traces(tmp_path: Path) -> None:
    recorded = trace(
        event("Kernel", "k", 0, 1, stream=1),
        event("Memset", "Memset (Device)", 2, 1, stream=1),
        event("Runtime", "cudaLaunchKernel", 0, 1),
    )
    recording = read_kineto(write(tmp_path / "t.json", recorded))
    assert recording.activities.type.tolist() == [0, 2]
    assert len(recording.calls.start) == 1


def test_impossible_events_are_skipped_and_counted(tmp_path: Path) -> None:
    recorded = trace(
        kernel("good", 0, 1),
        kernel("negative", 5, -1),
        {**kernel("text for a number", 6, 1), "ts": "6"},
        kernel("no number", 7, 1, launch="x"),
        kernel("late", 8, 1, stream="stream 3"),
    )
    recording = read_kineto(write(tmp_path / "t.json", recorded))
    assert recording.names == ("good", "late")
    assert (recording.events, recording.unusable_events) == (5, 3)
    assert recording.activities.stream.tolist() == [7, 3]


REJECTED = {
    "empty": (b"", "is empty"),
    "not_json": (b"\x00\x01\x02" * 50, "no 'traceEvents'"),
    "other_json": (b'{"a": 1}', "no 'traceEvents'"),
    "no_events": (b'{"traceEvents": []}', "no events"),
    "malformed": (b'{"traceEvents": [{"ph": X}]}', "malformed JSON at byte 24"),
    "cut_in_first": (b'{"traceEvents": [{"ph": "X', "stops at byte 26"),
    "no_gpu": (json.dumps(trace(launch(0, 1))).encode(), "ran on a GPU"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_files_that_are_not_traces_are_rejected_with_their_path(tmp_path: Path, name: str) -> None:
    data, message = REJECTED[name]
    path = tmp_path / f"{name}.json"
    path.write_bytes(data)
    with pytest.raises(BadTrace) as error:
        read_kineto(path)
    assert message in str(error.value) and str(path) in str(error.value)


def long_trace(count: int = 20_000) -> bytes:
    rng = random.Random(1)
    return json.dumps(
        trace(*(kernel(f"k{rng.random()}", n * 10, 5, launch=n) for n in range(count))), indent=1
    ).encode()


@pytest.mark.parametrize("packed", [False, True])
def test_the_events_before_a_truncation_are_read(tmp_path: Path, packed: bool) -> None:
    text = long_trace()
    data = gzip.compress(text) if packed else text
    path = tmp_path / "t.json"
    path.write_bytes(data[: len(data) // 2])
    recording = read_kineto(path)
    assert 5_000 < recording.events < 15_000
    assert len(recording.activities) == recording.events
    assert ("gzip stream breaks" if packed else "stops at byte") in str(recording.damage)


def test_the_events_before_a_malformed_event_are_read(tmp_path: Path) -> None:
    text = bytearray(long_trace())
    position = text.index(b'"dur"', 2 * len(text) // 3)
    text[position + 5] = ord("x")
    path = tmp_path / "t.json"
    path.write_bytes(text)
    recording = read_kineto(path)
    assert recording.events > 5_000
    assert f"malformed JSON at byte {position + 5}" in str(recording.damage)


def test_damaged_gzip_streams(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(long_trace()))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    assert read_kineto(path).damage
    path.write_bytes(b"\x1f\x8b" + b"no gzip" * 10)
    with pytest.raises(BadTrace, match=r"t\.json\.gz.*gzip"):
        read_kineto(path)


def test_memory_does_not_grow_with_skipped_events(tmp_path: Path) -> None:
    """The peak for 40 MB of operators and one kernel is a few chunks."""
    import tracemalloc

    operator = json.dumps(event("cpu_op", "aten::add", 0, 1, padding="x" * 900)).encode()
    path = tmp_path / "t.json"
    only_kernel = json.dumps(kernel("k", 0, 1)).encode()
    path.write_bytes(b'{"traceEvents": [' + (operator + b",\n") * 40_000 + only_kernel + b"]}")
    tracemalloc.start()
    try:
        recording = read_kineto(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert recording.events == 40_001
    assert peak < 16 * event_stream.CHUNK < path.stat().st_size / 2


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", trace(*(kernel(str(n), n, 1) for n in range(2000))))
    bytes_read: list[int] = []
    read_kineto(path, bytes_read.append)
    assert bytes_read == sorted(bytes_read)
    assert bytes_read[-1] == path.stat().st_size


SMALL_TRACE = json.dumps(
    trace(launch(0, 1), kernel("k{[", 2, 3, launch=1, **{"Input Dims": [[2], []]})), indent=1
).encode()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(SMALL_TRACE) - 1), st.sampled_from(b'{}[]",:\\x0 -e.')),
        max_size=6,
    ),
    st.integers(0, len(SMALL_TRACE)),
)
def test_damaged_traces_give_events_or_an_error_with_the_path(
    tmp_path_factory, changes, length
) -> None:
    """Bytes are changed and the end is cut off."""
    data = bytearray(SMALL_TRACE)
    for position, byte in changes:
        data[position] = byte
    path = tmp_path_factory.mktemp("f") / "t.json"
    path.write_bytes(data[:length])
    try:
        assert read_kineto(path).events > 0
    except BadTrace as error:
        assert str(path) in str(error)
