"""Files that are not traces in a format that nostall reads: what they are and the way on."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from nostall.core import BadJob, BadTrace
from nostall.core.files.atomic import check_content
from nostall.workload import read_jobs
from nostall.workload.traces.chakra.reader import read_chakra
from nostall.workload.traces.ranks import other_format, read_ranks
from tests.unit.workload.trace_events import kernel, trace, write

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%b\nsize 1055988361\n" % (
    b"a" * 64
)
XPLANE = b'\n\xb1\x16\x12\x0e/host:metadata"\xb6\x0b'


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.nsys-rep", b"\x00", "nsys export --type sqlite"),
        ("t.qdrep", b"", "nsys export --type sqlite"),
        ("t.ncu-rep", b"NVR\x00", "counters of single kernels"),
        ("t.xplane.pb", XPLANE, r"\.trace\.json\.gz"),
        ("renamed.bin", XPLANE, r"\.trace\.json\.gz"),
        ("trace", b"\n\x1eP\x01X\x02" + bytes(200), "traceconv json"),
        ("t.pb.gz", gzip.compress(b"\n\xb4\x01:\x08" + bytes(99), mtime=0), "traceconv json"),
        ("t.json", b'\n[{"ph": "X", "cat": "Op"}]', "'Op'. is not counted as GPU work"),
        ("t.json", b"PK\x03\x04", "ZIP archive; unpack"),
        ("t.json.zst", b"\x28\xb5\x2f\xfd", "zstd -d"),
        ("t.json", b"<!DOCTYPE html><html>", "is a web page"),
        ("t.json", b'{"schema": "1.1.1", "pid": 1, "nodes": [', "execution trace of PyTorch"),
        ("t.json.gz", gzip.compress(b'{"schema": "1.0.1", "nodes": [', mtime=0), "execution trace"),
        ("t.pickle", b"\x80\x04\x95\x00", "memory snapshot"),
        ("t.json", POINTER, "Git LFS to 1,055,988,361 bytes .* run 'git lfs pull'"),
        ("t.xplane.pb", POINTER, "git lfs pull"),
        ("t.json", b"/annex/objects/SHA256E-s9--abc.json\n", "git annex get"),
    ],
)  # fmt: skip
def test_a_file_is_refused_by_what_it_is(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadTrace, match=message):
        read_ranks([path])


def test_traces_are_not_taken_for_something_else(tmp_path: Path) -> None:
    recorded = trace(kernel("k", 0, 1), schema="1.0", nodes=[1])
    for name in ("t.json", "t.json.gz", "t"):
        assert other_format(write(tmp_path / name, recorded)) is None
    assert other_format(tmp_path / "absent") is None


def test_pointers_are_named_for_every_kind_of_file(tmp_path: Path) -> None:
    for name in ("jobs.csv", "jobs.parquet"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(BadJob, match="git lfs pull"):
            read_jobs(tmp_path / name)
    (tmp_path / "t.et").write_bytes(POINTER)
    with pytest.raises(BadTrace, match="git lfs pull"):
        read_chakra(tmp_path / "t.et")
    check_content(tmp_path / "absent", BadTrace)
