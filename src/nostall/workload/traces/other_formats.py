"""Recognition of trace files in formats that nostall does not read, and the way on for each."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

_SNIFFED = 1 << 16
"""Bytes of a file that are looked at."""
_SUFFIXES = {
    ".nsys-rep": "is a report of Nsight Systems; run 'nsys export --type sqlite {path}' and give "
    "the .sqlite file",
    ".qdrep": "is a report of Nsight Systems; run 'nsys export --type sqlite {path}' and give the "
    ".sqlite file",
    ".qdstrm": "is unprocessed data of Nsight Systems; run 'QdstrmImporter {path}', then 'nsys "
    "export --type sqlite' on the report, and give the .sqlite file",
    ".ncu-rep": "is a report of Nsight Compute, which has counters of single kernels and no "
    "timeline; record the step with torch.profiler or with Nsight Systems",
    ".xplane.pb": "is an XPlane file of JAX or TensorFlow; the profiler writes a .trace.json.gz "
    "file into the same folder, give that one",
    ".pftrace": "is a binary trace of Perfetto; run 'traceconv json {path} trace.json' and give "
    "trace.json",
    ".perfetto-trace": "is a binary trace of Perfetto; run 'traceconv json {path} trace.json' and "
    "give trace.json",
    ".rpd": "is a database of rocmProfileData; run 'rpd2tracing.py {path} trace.json' and give "
    "trace.json",
}
"""What files are by the end of their names."""
_XPLANE = re.compile(rb"/host:metadata|/device:(?:GPU|TPU|CUSTOM)|/host:CPU")
_MAGIC = (
    (b"PK\x03\x04", "is a ZIP archive; unpack it and give the traces in it"),
    (b"\x28\xb5\x2f\xfd", "is compressed with Zstandard; run 'zstd -d {path}' and give the result"),
    (b"BZh", "is compressed with bzip2; run 'bunzip2 -k {path}' and give the result"),
    (b"\xfd7zXZ\x00", "is compressed with xz; run 'unxz -k {path}' and give the result"),
    (b"PAR1", "is a Parquet file; name it .parquet if it is a job table, else export the trace as "
    "Chrome JSON"),
    (b"\x80\x04\x95", "is a Python pickle, such as a memory snapshot of PyTorch; give a trace that "
    "torch.profiler's export_chrome_trace wrote"),
    (b"\x80\x02", "is a Python pickle, such as a memory snapshot of PyTorch; give a trace that "
    "torch.profiler's export_chrome_trace wrote"),
)  # fmt: skip
"""What files are by their first bytes."""
_EXECUTION_TRACE = re.compile(rb'\{[^{}]*"schema"\s*:\s*"[^"]*"(?s:.)*?"nodes"\s*:\s*\[')
_NSYS_LINES = re.compile(rb'\{"(?:type|Type|data|CudaEvent|TraceProcessEvent|NvtxEvent)"')
_PAGE = re.compile(rb"\s*<(?:!doctype html|html)", re.IGNORECASE)


def other_format(path: Path) -> str | None:
    """What a file is and what to do, if nostall does not read its format; else None."""
    text = _start(path)
    for suffix, sentence in _SUFFIXES.items():
        if path.name.endswith(suffix):
            return f"{path} {sentence.format(path=path)}"
    for magic, sentence in _MAGIC:
        if text.startswith(magic):
            return f"{path} {sentence.format(path=path)}"
    if text[:1] == b"\n" and _XPLANE.search(text[:4096]):
        return f"{path} {_SUFFIXES['.xplane.pb']}"
    if _PAGE.match(text):
        return f"{path} is a web page; download the trace itself"
    if b'"traceEvents"' in text:
        return None
    if _EXECUTION_TRACE.match(text):
        return (
            f"{path} is an execution trace of PyTorch (operators without times of the GPU); give "
            "the trace that torch.profiler's export_chrome_trace wrote in the same run"
        )
    if _NSYS_LINES.match(text):
        return (
            f"{path} is a JSON export of Nsight Systems; run 'nsys export --type sqlite' on the "
            "report and give the .sqlite file"
        )
    return None


def _start(path: Path) -> bytes:
    """The first bytes of a file, unpacked; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_SNIFFED)
    except OSError:
        return b""
    if text.startswith(b"\x1f\x8b"):
        try:
            return zlib.decompressobj(31).decompress(text, _SNIFFED)
        except zlib.error:
            return b""
    return text
