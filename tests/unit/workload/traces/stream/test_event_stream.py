"""Event lists of trace files: boundaries of events, chunk sizes, damage at any byte."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core.files.text_blocks import CHUNK
from nostall.workload.traces.stream import TraceFile
from tests.unit.workload.trace_events import kernel, trace

Event = dict[str, Any]


def read_all(path: Path, chunk: int = CHUNK) -> tuple[list[Event], TraceFile]:
    file = TraceFile(path, chunk=chunk)
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
    events_read, file = read_all(path, chunk)
    assert events_read == expected
    assert file.remarks == ()
    assert json.loads(file.frame)["tail"] == frame["tail"]


@pytest.mark.parametrize("indent", [None, 0, 1])
def test_a_chunk_may_end_at_any_byte(tmp_path: Path, indent: int | None) -> None:
    """Between two events, after a backslash, inside a number."""
    expected = [{"a": 1}, {"b": {"c": [-12, "}, {"]}}, {"\\": '"'}, {"": 0}]
    text = json.dumps({"traceEvents": expected, "tail": 1}, indent=indent)
    path = tmp_path / "t.json"
    path.write_text(text)
    for chunk in range(1, len(text) + 1):
        events_read, file = read_all(path, chunk)
        assert (events_read, file.remarks) == (expected, ()), chunk


SMALL = [kernel(f"k{n}", n * 10, 5, launch=n, **{"Input Dims": [[2], []]}) for n in range(8)]


def written(path: Path, text: bytes) -> Path:
    path.write_bytes(text)
    return path


@pytest.mark.parametrize("indent", [None, 1])
def test_a_damaged_byte_costs_at_most_one_event_and_is_remarked(
    tmp_path: Path, indent: int | None
) -> None:
    text = json.dumps(trace(*SMALL), indent=indent).encode()
    begin, end = text.index(b"traceEvents"), text.rindex(b"]")
    rng = random.Random(1)
    for position in rng.sample(range(begin, end + 1), 250):
        byte = rng.choice(b'x"}{],\xff\0\\')
        if text[position] == byte:
            continue
        damaged = text[:position] + bytes([byte]) + text[position + 1 :]
        path = written(tmp_path / "t.json", damaged)
        events_read, file = read_all(path, rng.choice((64, 300, CHUNK)))
        kept = [e for e in events_read if e in SMALL]
        changed = [e for e in events_read if e not in SMALL]
        assert len(kept) >= len(SMALL) - 1, (position, byte)
        assert len(kept) == len(SMALL) or changed or file.remarks, (position, byte)


@pytest.mark.parametrize("size", [1, 30, 200])
@pytest.mark.parametrize("chunk", [100, CHUNK])
def test_bytes_cut_out_or_inserted_cost_the_events_that_they_touch(
    tmp_path: Path, size: int, chunk: int
) -> None:
    text = json.dumps(trace(*SMALL)).encode()
    event_size = len(json.dumps(SMALL[0])) + 2
    begin, end = text.index(b'{"ph"'), text.rindex(b"]")
    for position in range(begin, end - size, 17):
        touched = size // event_size + 2
        cut = text[:position] + text[position + size :]
        inserted = text[:position] + b"\0" * size + text[position:]
        for damaged, most_lost in ((cut, touched), (inserted, 1)):
            events_read, _ = read_all(written(tmp_path / "t.json", damaged), chunk)
            lost = len(SMALL) - sum(e in SMALL for e in events_read)
            assert lost <= most_lost, (position, size)


def test_a_trace_with_damage_in_every_chunk_is_read_in_linear_time(tmp_path: Path) -> None:
    """A quote too many turns all strings of the rest inside out."""
    rows = [json.dumps(kernel(f"k{n}", n, 1, launch=n)) for n in range(12_000)]
    for number in range(0, len(rows), 50):
        rows[number] = rows[number].replace('"ph"', '"ph""', 1)
    text = '{"traceEvents": [' + ", ".join(rows) + "]}"
    start = time.process_time()
    events_read, file = read_all(written(tmp_path / "t.json", text.encode()), 1 << 17)
    assert time.process_time() - start < 5
    assert (len(events_read), file.lost) == (12_000 - 240, 240)
    assert file.remarks == (
        f"240 events are not valid JSON and are skipped, first at byte {text.index('[') + 1}",
    )


def test_text_without_events_is_skipped_and_the_events_behind_it_are_read(tmp_path: Path) -> None:
    before, after = (json.dumps(SMALL[n]).encode() for n in (0, 1))
    hole = b'{"traceEvents": [' + before + b", " + bytes(3 << 20) + b", " + after + b"]}"
    events_read, file = read_all(written(tmp_path / "t.json", hole), 1 << 16)
    assert events_read == SMALL[:2]
    assert len(file.remarks) == 1


def test_parts_of_a_damaged_event_are_no_events(tmp_path: Path) -> None:
    parts = b'{"ph": "X", "ts": X, "args": {"list": [{"name": 1}, {"name": 2}], "d": {"id": 3}}}'
    events = b", ".join((json.dumps(SMALL[0]).encode(), parts, json.dumps(SMALL[1]).encode()))
    path = written(tmp_path / "t.json", b'{"traceEvents": [%b]}' % events)
    events_read, file = read_all(path)
    assert (events_read, file.lost) == (SMALL[:2], 2)  # its text has a border between events


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"traceEvents": [%b, %b]} trailing', 2),
        (b'{"traceEvents": [%b, %b]}\n{"traceEvents": []}', 2),
        (b'{"traceEvents": [%b, %b], "traceName": "t}', 2),
        (b'{"traceEvents": [%b, %b', 2),
        (b'{"traceEvents": [%b %b]}', 2),
        (b'{"traceEvents": [%b,, %b,]}', 2),
        (b'{"traceEvants": [%b, %b]}', 2),
        (b'{"traceEvents: [%b, %b]}', 2),
        (b"[%b, %b] trailing", 2),
        (b"[%b, %b", 2),
        (b"%b\n%b\n", 2),
        (b'{"traceEvents": [%b, [%b]]}', 1),
    ],
)
def test_the_frame_may_be_damaged(tmp_path: Path, text: bytes, expected: int) -> None:
    pair = tuple(json.dumps(e).encode() for e in SMALL[:2])
    events_read, _ = read_all(written(tmp_path / "t.json", text % pair))
    assert [e for e in events_read if isinstance(e, dict)] == SMALL[:expected]


@pytest.mark.parametrize(
    "encode",
    [
        lambda text: codecs.BOM_UTF8 + text.encode(),
        lambda text: text.encode("utf-16"),
        lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
        lambda text: gzip.compress(codecs.BOM_UTF8 + text.encode()),
    ],
)
@pytest.mark.parametrize("chunk", [1, 7, CHUNK])
def test_byte_order_marks(tmp_path: Path, encode, chunk: int) -> None:
    text = encode(json.dumps(trace(*SMALL)))
    events_read, file = read_all(written(tmp_path / "t.json", text), chunk)
    assert (events_read, file.remarks) == (SMALL, ())


def test_a_gzip_stream_gives_the_text_before_its_damage(tmp_path: Path) -> None:
    rng = random.Random(2)
    recorded = [kernel(f"k{rng.random()}", n, 5, launch=n) for n in range(9000)]
    data = bytearray(gzip.compress(json.dumps(trace(*recorded)).encode()))
    position = len(data) * 2 // 3
    data[position : position + 400] = bytes(400)
    events_read, file = read_all(written(tmp_path / "t.json.gz", bytes(data)))
    assert events_read[:5000] == recorded[:5000]
    assert len(events_read) > 0.6 * len(recorded)
    assert any("gzip stream breaks" in remark for remark in file.remarks)
