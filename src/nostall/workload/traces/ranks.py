"""Reader for the Kineto traces of several ranks of one job, with checks across the ranks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.core.files.atomic import check_content
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.host import HostRecording, read_host
from nostall.workload.traces.kineto.reader import NoGpuActivity, read_kineto
from nostall.workload.traces.nsight import is_sqlite, read_nsight
from nostall.workload.traces.recording import Recording

_SNIFFED = 1 << 16
"""Bytes of a file that are looked at."""
_NSYS = (
    "is a report of Nsight Systems; run 'nsys export --type sqlite {path}' and give the .sqlite "
    "file"
)
_PERFETTO = (
    "is a binary trace of Perfetto; run 'traceconv json {path} trace.json' and give trace.json"
)
_PICKLE = (
    "is a Python pickle, such as a memory snapshot of PyTorch; give a trace that torch.profiler's "
    "export_chrome_trace wrote"
)
_SUFFIXES = {
    ".nsys-rep": _NSYS,
    ".qdrep": _NSYS,
    ".qdstrm": "is unprocessed data of Nsight Systems; run 'QdstrmImporter {path}', then 'nsys "
    "export --type sqlite' on the report, and give the .sqlite file",
    ".ncu-rep": "is a report of Nsight Compute, which has counters of single kernels and no "
    "timeline; record the step with torch.profiler or with Nsight Systems",
    ".xplane.pb": "is an XPlane file of JAX or TensorFlow; the profiler writes a .trace.json.gz "
    "file into the same folder, give that one",
    ".pftrace": _PERFETTO,
    ".perfetto-trace": _PERFETTO,
    ".rpd": "is a database of rocmProfileData; run 'rpd2tracing.py {path} trace.json' and give "
    "trace.json",
}
"""What files are by the end of their names."""
_XPLANE = re.compile(rb"/host:metadata|/device:(?:GPU|TPU|CUSTOM)|/host:CPU")
_BINARY = re.compile(rb"\n[^{}]{0,64}?[\x00-\x08\x0e-\x1f\x7f-\xff]")
"""Start of a protobuf message whose first field is a message, as those of Perfetto are."""
_MAGIC = (
    (b"PK\x03\x04", "is a ZIP archive; unpack it and give the traces in it"),
    (b"\x28\xb5\x2f\xfd", "is compressed with Zstandard; run 'zstd -d {path}' and give the result"),
    (b"BZh", "is compressed with bzip2; run 'bunzip2 -k {path}' and give the result"),
    (b"\xfd7zXZ\x00", "is compressed with xz; run 'unxz -k {path}' and give the result"),
    (b"PAR1", "is a Parquet file; name it .parquet if it is a job table, else export the trace as "
    "Chrome JSON"),
    (b"\x80\x04\x95", _PICKLE),
    (b"\x80\x02", _PICKLE),
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
    if _BINARY.match(text):
        return (
            f"{path} is a binary file of protobuf messages; if it is a trace of Perfetto, run "
            f"'traceconv json {path} trace.json' and give trace.json"
        )
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


Progress = Callable[[Path, int], None]
"""Called with a file and the number of its bytes that have been read."""


@dataclass(frozen=True)
class RankRecordings:
    """The traces that could be read, and what is wrong with the others or with the set."""

    recordings: tuple[Recording, ...]
    hosts: tuple[HostRecording, ...]
    """Traces without GPU activities."""
    unreadable: tuple[str, ...]
    """Reason for each file that could not be read."""
    notes: tuple[str, ...]
    """Damage of files, missing or repeated ranks, mixed schema versions."""


def read_ranks(
    paths: Sequence[Path], *, processes: int = 1, progress: Progress | None = None
) -> RankRecordings:
    """Read all traces that can be read, in ``processes`` worker processes if more than 1.

    Raises :class:`~nostall.core.errors.BadTrace` with the first reason if none can be read.
    """
    if processes > 1 and len(paths) > 1:
        results = _read_in_processes(paths, processes, progress)
    else:
        results = [_read(path, _file_progress(path, progress)) for path in paths]
    recordings = [result for result in results if isinstance(result, Recording)]
    hosts = [result for result in results if isinstance(result, HostRecording)]
    unreadable = [result for result in results if isinstance(result, str)]
    if not recordings and not hosts:
        raise BadTrace(unreadable[0] if unreadable else "no traces to read; give at least one file")
    notes = _notes([*recordings, *hosts])
    return RankRecordings(tuple(recordings), tuple(hosts), tuple(unreadable), tuple(notes))


def _read_in_processes(
    paths: Sequence[Path], processes: int, progress: Progress | None
) -> list[Recording | HostRecording | str]:
    results = []
    try:
        with ProcessPoolExecutor(min(processes, len(paths)), get_context("spawn")) as pool:
            for path, result in zip(paths, pool.map(_read, paths), strict=True):
                results.append(result)
                if progress is not None:
                    progress(path, path.stat().st_size if path.exists() else 0)
    except BrokenProcessPool as error:
        raise BadTrace(
            f"a process that read {paths[len(results)]} died, probably for lack of memory; use "
            "fewer --processes"
        ) from error
    return results


def _file_progress(path: Path, progress: Progress | None) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(path, done)


def _read(
    path: Path, progress: Callable[[int], None] | None = None
) -> Recording | HostRecording | str:
    """The recording, or the reason if the file cannot be read."""
    try:
        check_content(path, BadTrace)
        if is_sqlite(path):
            return read_nsight(path)
        if (reason := other_format(path)) is not None:
            return reason
        try:
            return read_kineto(path, progress)
        except NoGpuActivity:
            return read_host(path, progress)
    except BadTrace as error:
        return str(error)


def _notes(recordings: Sequence[Recording | HostRecording]) -> list[str]:
    notes = []
    for recording in recordings:
        notes += [f"{recording.path}: {remark}" for remark in recording.remarks]
        if isinstance(recording, HostRecording):
            notes.append(
                f"{recording.path}: none of {pluralize(recording.events, 'event')} ran on a GPU; "
                "only the time of the host is shown (ProfilerActivity.CUDA records GPUs)"
            )
    ranks = [recording.rank for recording in recordings if recording.rank is not None]
    world_size = max((recording.world_size or 0 for recording in recordings), default=0)
    repeated = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if repeated:
        notes.append(f"more than one trace has rank {', '.join(map(str, repeated))}")
    present = {rank for rank in ranks if 0 <= rank < world_size}
    num_missing = world_size - len(present)
    if ranks and num_missing:
        first = list(islice((r for r in range(world_size) if r not in present), 8))
        listed = ", ".join(map(str, first)) + (", …" if num_missing > len(first) else "")
        notes.append(f"no trace for {num_missing} of {world_size} ranks ({listed})")
    schemas = sorted({str(r.schema) for r in recordings if isinstance(r, Recording)})
    if len(schemas) > 1:
        notes.append(f"the traces have different schema versions ({', '.join(schemas)})")
    return notes
