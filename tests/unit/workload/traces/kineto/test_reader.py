"""Reading of Kineto traces: boundaries of events, file formats, damage, skipped events."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core import BadTrace
from nostall.core.files.text_blocks import CHUNK
from nostall.workload.traces.kineto.reader import read_kineto
from tests.unit.workload.trace_events import event, kernel, launch, trace, write

GEMM = "ampere_sgemm_128x64_nn"


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
    assert (recording.events, recording.remarks) == (10, ())
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
        {**kernel("text", 6, 1), "ts": "soon"},
        {k: v for k, v in kernel("no start", 6, 1).items() if k != "ts"},
        {**kernel("no duration", 6, 1), "dur": None},
        {**kernel("infinite", 6, 1), "dur": 10**400},
        {**kernel("no phase", 7, 1), "ph": "Q"},
        {**kernel("in two halves", 7, 1), "ph": "B"},
        {**kernel("in two halves", 8, 1), "ph": "E"},
        7,
        kernel("late", 8, 1, stream="stream 3"),
    )
    recording = read_kineto(write(tmp_path / "t.json", recorded))
    assert recording.names == ("good", "late")
    assert recording.events == 11
    assert recording.activities.stream.tolist() == [7, 3]
    assert set(recording.remarks) == {
        "5 events without a valid start or duration are skipped",
        "1 event without a valid phase is skipped",
        "1 event with a begin and an end (phases B and E) and without a duration is skipped",
        "1 event with other JSON than an event is skipped",
    }


def test_numbers_may_be_text(tmp_path: Path) -> None:
    number = {"Input Dims": [[64, 128], [128, 32]], "Input type": ["float", "float"]}
    expected = trace(
        event("cpu_op", "aten::mm", 0, 1, **number, **{"External id": 5}),
        launch(1, 9),
        kernel("k", 2, 3, launch=9, stream=20, **{"External id": 5}),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 6, 5, stream=9, bytes=4096),
        kernel("ncclAllReduce", 20, 5, dtype="Float", **{"In msg nelems": 10}),
    )
    as_text = json.loads(json.dumps(expected), parse_int=str)
    as_text["traceEvents"][0]["args"]["Input Dims"] = number["Input Dims"]
    numbers, texts = (
        read_kineto(write(tmp_path / f"{n}.json", recorded))
        for n, recorded in enumerate((expected, as_text))
    )
    assert texts.remarks == ()
    assert texts.operator_costs == numbers.operator_costs
    assert (texts.rank, texts.schema) == (numbers.rank, numbers.schema)
    for field in numbers.activities.__dataclass_fields__:
        read = getattr(texts.activities, field)
        assert read.tolist() == getattr(numbers.activities, field).tolist(), field
    assert texts.calls.correlation.tolist() == [9]


@pytest.mark.parametrize(
    "odd", [2**64 - 1, 2**63, 10**30, -(10**30), 1.5, "0x55d0", "x" * 50, [3], {"a": 1}, True]
)
def test_ids_that_are_no_64_bit_numbers_cost_nothing(tmp_path: Path, odd: object) -> None:
    """A launch is still found if the id is the same on both sides."""
    recorded = trace(
        launch(0, odd),  # type: ignore[arg-type]
        kernel("k", 5, 5, launch=odd, stream=odd, device=0, **{"External id": odd}),
        kernel("k", 20, 5, launch=odd, stream=odd, device=odd),
    )
    recording = read_kineto(write(tmp_path / "t.json", recorded))
    assert len(recording.activities) == 2
    assert len(set(recording.activities.stream.tolist())) == 1
    correlation = recording.activities.correlation
    if isinstance(odd, list | dict):
        assert (correlation == -1).all()
    elif odd != -(10**30):
        assert correlation[0] == recording.calls.correlation[0] >= 0


EPOCH = 1_700_000_000_000_000
FAR = {
    "zero": (0, 0, None),
    "zero with a duration": (0, 100, None),
    "a changed digit": (EPOCH + 3e12, 100, None),
    "a changed digit, launched in time": (EPOCH + 4e6, 100, EPOCH + 10),
    "a duration of months": (EPOCH + 40, 1e13, None),
}


@pytest.mark.parametrize("name", FAR)
def test_activities_outside_the_time_of_the_trace_are_skipped(tmp_path: Path, name: str) -> None:
    start, duration, launched = FAR[name]
    recorded = [launch(EPOCH + n * 10, n) for n in range(3)]
    recorded += [kernel("good", EPOCH + 5 + n * 10, 5, launch=n) for n in range(3)]
    recorded.append(kernel("odd", start, duration, launch=9))
    if launched:
        recorded.append(launch(launched, 9))
    recording = read_kineto(write(tmp_path / "t.json", trace(*recorded)))
    assert recording.activities.start.tolist() == pytest.approx([0, 10e-6, 20e-6])
    assert recording.remarks == ("1 event with a time far outside the trace is skipped",)


def test_long_but_sound_traces_are_complete(tmp_path: Path) -> None:
    """A copy minutes before the steps, launched then; a collective that hangs for ten minutes."""
    recorded = trace(
        launch(0, 1),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 5, 1, stream=7, correlation=1),
        launch(300e6, 2),
        kernel("k", 300e6 + 9, 5, launch=2),
        launch(300e6 + 20, 3),
        kernel("ncclAllReduce", 300e6 + 30, 600e6, launch=3),
    )
    recording = read_kineto(write(tmp_path / "t.json", recorded))
    assert (len(recording.activities), recording.remarks) == (3, ())


def test_launches_without_work_are_remarked(tmp_path: Path) -> None:
    """A file that is cut off, or full buffers of the profiler, lack kernels of launches."""
    events = [
        one for n in range(1, 6) for one in (launch(9 * n, n), kernel("k", 9 * n, 5, launch=n))
    ]
    graph = event("cuda_runtime", "cudaGraphLaunch", 60, 5, correlation=9)
    callback = event("cuda_runtime", "cudaLaunchHostFunc", 60, 5, correlation=10)
    whole = read_kineto(write(tmp_path / "t.json", trace(*events, graph, callback)))
    assert whole.remarks == ()
    cut = read_kineto(write(tmp_path / "t.json", trace(*events[:-1])))
    [remark] = cut.remarks
    assert remark.startswith("1 of 5 launch calls has no GPU event: it is lost")
    unlinked = [e | {"args": e["args"] | {"correlation": 50}} if e["cat"] == "kernel" else e
                for e in events]  # fmt: skip
    assert read_kineto(write(tmp_path / "t.json", trace(*unlinked))).remarks == ()


def test_events_of_unknown_categories_are_remarked(tmp_path: Path) -> None:
    recorded = trace(
        kernel("k", 0, 1),
        event("kernXl", "k", 2, 1, stream=7),
        event("kernXl", "k", 4, 1, stream=7),
        event("new_host_thing", "f", 4, 1),
    )
    recording = read_kineto(write(tmp_path / "t.json", recorded))
    assert recording.remarks == (
        "2 events of unknown categories ('kernXl') are not counted as GPU work",
    )


def test_xpu_and_hip_runtime_calls(tmp_path: Path) -> None:
    recorded = trace(
        kernel("k", 0, 1, launch=1),
        event("xpu_runtime", "urEnqueueKernelLaunch", 0, 1, correlation=1),
        event("xpu_runtime", "urQueueFinish", 3, 1, correlation=2),
        event("hip_runtime", "hipStreamSynchronize", 5, 1),
        event("hip_runtime", "hipExtModuleLaunchKernel", 7, 1, correlation=3),
    )
    calls = read_kineto(write(tmp_path / "t.json", recorded)).calls
    assert calls.synchronizes.tolist() == [False, True, True, False]
    assert calls.correlation.tolist() == [1, 2, -1, 3]


def test_names_have_no_control_characters(tmp_path: Path) -> None:
    recorded = trace(kernel("\x1b[31mred\x07\u009b", 0, 1), kernel("\ud800", 2, 1))
    names = read_kineto(write(tmp_path / "t.json", recorded)).names
    assert all(name.isprintable() for name in names)
    "".join(names).encode()


METADATA = {
    "rank as text": ({"distributedInfo": {"rank": "3", "world_size": "8"}}, 3, 8),
    "absurd world": ({"distributedInfo": {"rank": 1, "world_size": 10**30}}, 1, None),
    "rank of a wrong type": ({"distributedInfo": {"rank": [1], "world_size": 2}}, None, 2),
    "devices of a wrong type": ({"deviceProperties": {"a": [1]}}, 0, 1),
    "a text for an object": ({"distributedInfo": "none"}, None, None),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_wrong_types_is_missing(tmp_path: Path, name: str) -> None:
    fields, rank, world = METADATA[name]
    recorded = {**trace(kernel("k", 0, 1)), **fields}
    recording = read_kineto(write(tmp_path / "t.json", recorded))
    assert (recording.rank, recording.world_size) == (rank, world)


@pytest.mark.parametrize("tail", ["} trailing", '", "other": {"a": NaN}', "", "]"])
def test_metadata_before_the_events_survives_damage_after_them(tmp_path: Path, tail: str) -> None:
    text = json.dumps(trace(kernel("k", 0, 1), rank=3, world=8))
    path = write(tmp_path / "t.json", (text.rstrip("}") + tail).encode())
    recording = read_kineto(path)
    assert (recording.rank, recording.world_size, recording.gpu) == (3, 8, "Test GPU")
    assert len(recording.remarks) == 1
    path.write_text(text[: text.rindex("]")] + "," + json.dumps(kernel("k", 9, 1)) + ", {")
    cut = read_kineto(path)
    assert (cut.rank, len(cut.activities), len(cut.remarks)) == (3, 2, 1)


REJECTED = {
    "empty": (b"", "is empty"),
    "not_json": (b"\x00\x01\x02" * 50, "no 'traceEvents'"),
    "other_json": (b'{"a": 1}', "no 'traceEvents'"),
    "no_events": (b'{"traceEvents": []}', "no events"),
    "malformed": (b'{"traceEvents": [{"ph": X}]}', "1 event is not valid JSON and is skipped"),
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
    [remark] = recording.remarks
    assert ("gzip stream breaks" if packed else "stops at byte") in remark


def test_the_events_around_a_malformed_event_are_read(tmp_path: Path) -> None:
    text = bytearray(long_trace())
    position = text.index(b'"dur"', len(text) // 2)
    text[position + 5] = ord("x")
    path = tmp_path / "t.json"
    path.write_bytes(text)
    recording = read_kineto(path)
    assert recording.events == 20_000 - 1
    start = text.rindex(b"{", 0, position)
    assert recording.remarks == (
        f"1 event is not valid JSON and is skipped, first at byte {start}",
    )


def test_damaged_gzip_streams(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(long_trace()))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    assert read_kineto(path).remarks
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
    assert peak < 16 * CHUNK < path.stat().st_size / 2


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
