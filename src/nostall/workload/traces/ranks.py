"""Several traces of one job, one a rank: read side by side, checked against each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.workload.traces.kineto import read_kineto
from nostall.workload.traces.recording import Recording

Progress = Callable[[Path, int], None]
"""Called with a file and the bytes of it read so far."""


@dataclass(frozen=True)
class Ranks:
    """The recordings that could be read, what was left out (one line each), and what is odd."""

    recordings: tuple[Recording, ...]
    left_out: tuple[str, ...]
    remarks: tuple[str, ...]


def read_ranks(
    paths: Sequence[Path], *, processes: int = 1, progress: Progress | None = None
) -> Ranks:
    """Read every trace that can be read.

    With ``processes`` > 1 files are read side by side.  Raises
    :class:`~nostall.core.errors.BadTrace` with the first reason where none can be read.
    """
    if processes > 1 and len(paths) > 1:
        with ProcessPoolExecutor(min(processes, len(paths)), get_context("spawn")) as pool:
            read = []
            for path, outcome in zip(paths, pool.map(_read, paths), strict=True):
                read.append(outcome)
                if progress is not None:
                    progress(path, path.stat().st_size if path.exists() else 0)
    else:
        read = [_read(path, _for_file(path, progress)) for path in paths]
    good = [one for one in read if isinstance(one, Recording)]
    bad = [one for one in read if isinstance(one, str)]
    if not good:
        raise BadTrace(bad[0] if bad else "no traces were given; give at least one file")
    return Ranks(tuple(good), tuple(bad), tuple(_remarks(good)))


def _for_file(path: Path, progress: Progress | None) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress(path, done)


def _read(path: Path, progress: Callable[[int], None] | None = None) -> Recording | str:
    try:
        return read_kineto(path, progress)
    except BadTrace as error:
        return str(error)


def _remarks(recordings: Sequence[Recording]) -> list[str]:
    """What a reader of the numbers should know about the files."""
    found = []
    for one in recordings:
        if one.damage:
            found.append(f"{one.path}: {one.damage}; what came before is used")
        if one.left_out:
            found.append(f"{one.path}: {one.left_out} of {one.events} events are unusable")
    ranks = [one.rank for one in recordings if one.rank is not None]
    world = max((one.world_size or 0 for one in recordings), default=0)
    doubled = sorted({r for r in ranks if ranks.count(r) > 1})
    if doubled:
        found.append(f"rank {', '.join(map(str, doubled))} comes more than once")
    missing = sorted(set(range(world)) - set(ranks))
    if ranks and missing:
        some = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
        found.append(f"{len(missing)} of {world} ranks have no trace here ({some})")
    schemas = sorted({str(one.schema) for one in recordings})
    if len(schemas) > 1:
        found.append(f"the traces have different schema versions ({', '.join(schemas)})")
    return found
