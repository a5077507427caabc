"""Reader for the Kineto traces of several ranks of one job, with checks across the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.core.files.pointers import check_content
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.host import HostRecording, read_host
from nostall.workload.traces.kineto.reader import NoGpuActivity, read_kineto
from nostall.workload.traces.nsight import is_sqlite, read_nsight
from nostall.workload.traces.other_formats import other_format
from nostall.workload.traces.recording import Recording

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
