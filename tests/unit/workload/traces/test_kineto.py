"""Reading traces: boundaries of events, forms of files, damage, and what is left out."""

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
from nostall.workload.traces import chunks
from nostall.workload.traces.chunks import TraceFile
from nostall.workload.traces.kineto import read_kineto
from tests.unit.workload.trace_events import event, kernel, launch, trace, write

GEMM = "ampere_sgemm_128x64_nn"


def read_all(path: Path) -> tuple[list[Any], TraceFile]:
    file = TraceFile(path)
    return [e for some in file.lists(msgspec.json.decode) for e in some], file


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
def test_any_events_come_back_whatever_the_chunks(
    tmp_path_factory, many, indent, chunk, packed, escaped
) -> None:
    """Brackets, quotes and commas inside names and nested lists never move a boundary."""
    path = tmp_path_factory.mktemp("t") / ("t.json.gz" if packed else "t.json")
    frame = {"schemaVersion": 1, "traceEvents": many, "tail": [{"a": "}, {"}, {"b": "]"}]}
    text = json.dumps(frame, indent=indent, ensure_ascii=escaped).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    before, chunks.CHUNK = chunks.CHUNK, chunk
    try:
        found, file = read_all(path)
    finally:
        chunks.CHUNK = before
    assert found == many
    assert file.damage is None
    assert json.loads(file.frame)["tail"] == frame["tail"]


@pytest.mark.parametrize("indent", [None, 0, 1])
def test_no_chunk_ends_at_a_bad_place(tmp_path: Path, monkeypatch, indent: int | None) -> None:
    """Between two events, behind a backslash, inside a number: every boundary there is."""
    many = [{"a": 1}, {"b": {"c": [-12, "}, {"]}}, {"\\": '"'}, {"": 0}]
    text = json.dumps({"traceEvents": many, "tail": 1}, indent=indent)
    path = tmp_path / "t.json"
    path.write_text(text)
    for chunk in range(1, len(text) + 1):
        monkeypatch.setattr(chunks, "CHUNK", chunk)
        found, file = read_all(path)
        assert (found, file.damage) == (many, None), chunk


def test_a_bare_list_and_several_gzip_members_are_traces_too(tmp_path: Path) -> None:
    bare = write(tmp_path / "bare.json", [kernel("k", 0, 1)])
    assert len(read_kineto(bare).activities) == 1
    text = json.dumps(trace(kernel("k", 0, 1))).encode()
    members = tmp_path / "members.json.gz"
    members.write_bytes(gzip.compress(text[:60]) + gzip.compress(text[60:]))
    assert len(read_kineto(members).activities) == 1


def test_what_is_read(tmp_path: Path) -> None:
    made = trace(
        event("user_annotation", "ProfilerStep#3", 90, 60),
        event("user_annotation", "enumerate(DataLoader)#_Next", 91, 4),
        event("cpu_op", "aten::mm", 92, 9, **MM, **{"External id": 5}),
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
    found = read_kineto(write(tmp_path / "t.json.gz", made))
    assert (found.rank, found.world_size, found.gpu) == (3, 8, "Test GPU")
    assert (found.events, found.left_out, found.damage) == (10, 0, None)
    own = found.activities
    assert own.start.tolist() == pytest.approx([0, 10e-6, 30e-6])
    assert own.kind.tolist() == [1, 0, 0]
    assert own.size.tolist() == [4096, 0, 0]
    assert own.message.tolist() == [0, 0, 2000]
    assert own.operator.tolist() == [-1, 5, -1]
    assert found.calls.waits.tolist() == [False, True]
    assert found.steps == pytest.approx(np.array([[-20e-6, 40e-6]]))
    assert len(found.loading) == 1
    assert found.amounts[5].flops == 2 * 64 * 128 * 32
    assert found.amounts[5].size == 4 * (64 * 128 + 128 * 32 + 64 * 32)


MM = {"Input Dims": [[64, 128], [128, 32]], "Input type": ["float", "float"]}


@pytest.mark.parametrize(
    ("operator", "dims", "types", "flops"),
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
def test_products_by_their_shapes(
    tmp_path: Path, operator: str, dims: object, types: object, flops: float | None
) -> None:
    args = {"Input Dims": dims, "Input type": types, "External id": 1}
    made = trace(event("cpu_op", operator, 0, 1, **args), kernel(GEMM, 1, 1))
    found = read_kineto(write(tmp_path / "t.json", made)).amounts
    assert (found[1].flops if found else None) == flops


def test_old_traces_that_repeat_the_correlation_name_no_operator(tmp_path: Path) -> None:
    made = trace(kernel(GEMM, 0, 1, launch=7, **{"External id": 7}))
    assert read_kineto(write(tmp_path / "t.json", made)).activities.operator.tolist() == [-1]


def test_old_categories(tmp_path: Path) -> None:
    made = trace(
        event("Kernel", "k", 0, 1, stream=1),
        event("Memset", "Memset (Device)", 2, 1, stream=1),
        event("Runtime", "cudaLaunchKernel", 0, 1),
    )
    found = read_kineto(write(tmp_path / "t.json", made))
    assert found.activities.kind.tolist() == [0, 2]
    assert len(found.calls.start) == 1


def test_impossible_events_are_left_out_and_counted(tmp_path: Path) -> None:
    made = trace(
        kernel("good", 0, 1),
        kernel("negative", 5, -1),
        {**kernel("text for a number", 6, 1), "ts": "6"},
        kernel("no number", 7, 1, launch="x"),
        kernel("late", 8, 1, stream="stream 3"),
    )
    found = read_kineto(write(tmp_path / "t.json", made))
    assert found.names == ("good", "late")
    assert (found.events, found.left_out) == (5, 3)
    assert found.activities.stream.tolist() == [7, 3]


REFUSED = {
    "empty": (b"", "is empty"),
    "not_json": (b"\x00\x01\x02" * 50, "no 'traceEvents'"),
    "other_json": (b'{"a": 1}', "no 'traceEvents'"),
    "no_events": (b'{"traceEvents": []}', "no events"),
    "malformed": (b'{"traceEvents": [{"ph": X}]}', "malformed JSON at byte 24"),
    "cut_in_first": (b'{"traceEvents": [{"ph": "X', "stops at byte 26"),
    "no_gpu": (json.dumps(trace(launch(0, 1))).encode(), "ran on a GPU"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_trace_is_refused_in_one_line_with_its_place(tmp_path: Path, name: str) -> None:
    data, said = REFUSED[name]
    path = tmp_path / f"{name}.json"
    path.write_bytes(data)
    with pytest.raises(BadTrace) as error:
        read_kineto(path)
    assert said in str(error.value) and str(path) in str(error.value)


def long_trace(count: int = 20_000) -> bytes:
    rng = random.Random(1)
    return json.dumps(
        trace(*(kernel(f"k{rng.random()}", n * 10, 5, launch=n) for n in range(count))), indent=1
    ).encode()


@pytest.mark.parametrize("packed", [False, True])
def test_a_truncated_trace_gives_what_came_before(tmp_path: Path, packed: bool) -> None:
    text = long_trace()
    data = gzip.compress(text) if packed else text
    path = tmp_path / "t.json"
    path.write_bytes(data[: len(data) // 2])
    found = read_kineto(path)
    assert 5_000 < found.events < 15_000
    assert len(found.activities) == found.events
    assert ("gzip stream breaks" if packed else "stops at byte") in str(found.damage)


def test_a_corrupt_middle_gives_what_came_before_and_the_place(tmp_path: Path) -> None:
    text = bytearray(long_trace())
    at = text.index(b'"dur"', 2 * len(text) // 3)
    text[at + 5] = ord("x")
    path = tmp_path / "t.json"
    path.write_bytes(text)
    found = read_kineto(path)
    assert found.events > 5_000
    assert f"malformed JSON at byte {at + 5}" in str(found.damage)


def test_corrupt_gzip(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(long_trace()))
    data[len(data) // 2 : len(data) // 2 + 40] = bytes(40)
    path = tmp_path / "t.json.gz"
    path.write_bytes(data)
    assert read_kineto(path).damage
    path.write_bytes(b"\x1f\x8b" + b"no gzip" * 10)
    with pytest.raises(BadTrace, match=r"t\.json\.gz.*gzip"):
        read_kineto(path)


def test_memory_does_not_grow_with_what_is_not_kept(tmp_path: Path) -> None:
    """40 MB of operators and one kernel: the peak stays at a few chunks."""
    import tracemalloc

    one = json.dumps(event("cpu_op", "aten::add", 0, 1, padding="x" * 900)).encode()
    path = tmp_path / "t.json"
    last = json.dumps(kernel("k", 0, 1)).encode()
    path.write_bytes(b'{"traceEvents": [' + (one + b",\n") * 40_000 + last + b"]}")
    tracemalloc.start()
    try:
        found = read_kineto(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.events == 40_001
    assert peak < 16 * chunks.CHUNK < path.stat().st_size / 2


def test_progress_reaches_the_size_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json.gz", trace(*(kernel(str(n), n, 1) for n in range(2000))))
    seen: list[int] = []
    read_kineto(path, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


WHOLE = json.dumps(
    trace(launch(0, 1), kernel("k{[", 2, 3, launch=1, **{"Input Dims": [[2], []]})), indent=1
).encode()


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(WHOLE) - 1), st.sampled_from(b'{}[]",:\\x0 -e.')), max_size=6
    ),
    st.integers(0, len(WHOLE)),
)
def test_no_damage_crashes_it(tmp_path_factory, changes, length) -> None:
    """Bytes are changed and the end is cut off: it reads something, or names the file."""
    data = bytearray(WHOLE)
    for at, byte in changes:
        data[at] = byte
    path = tmp_path_factory.mktemp("f") / "t.json"
    path.write_bytes(data[:length])
    try:
        assert read_kineto(path).events > 0
    except BadTrace as error:
        assert str(path) in str(error)
