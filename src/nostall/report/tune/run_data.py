"""A run directory as the report needs it: both schedules of the kernel and the run's story."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nostall.core import BadInput, BadRun, LaunchSpec, Run, Trial
from nostall.core.run import RunRecord
from nostall.sass import Function, Program
from nostall.sass.safety.structure import Mismatch, align
from nostall.sass.schedule import Schedule
from nostall.search.episodes import Episode, read_episodes
from nostall.tuning.strategies import LOGS


@dataclass(frozen=True)
class LoadedRun:
    """``original`` and ``candidate`` are the same kernel in two schedules; ``what`` names the
    candidate (``best``, ``best so far`` or ``refused``) and ``file`` is where it lies, if anywhere.
    ``notes`` are remarks on parts that could not be used."""

    path: Path
    record: RunRecord
    trials: tuple[Trial, ...]
    episodes: tuple[Episode, ...]
    program: Program
    original: Function
    candidate: Function
    what: str
    file: str | None
    launch: LaunchSpec | None
    provenance: Mapping[str, Any]
    hashes: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the run was asked to do."""
        return self.record.settings

    @property
    def result(self) -> Mapping[str, Any]:
        """What the run found; empty as long as it has not ended."""
        return self.record.result or {}


def load(path: Path) -> LoadedRun:
    """Read a run directory; whatever is missing or foreign is a :class:`BadRun`.

    Optional parts (trials, launch, provenance) may be absent.
    """
    run = Run.open(path)
    notes: list[str] = []
    data = _bytes(path / "original.cubin")
    program = _program(data, path / "original.cubin")
    original = _kernel(program, run.record.settings.get("kernel"), path)
    candidate, what, file = _candidate(run, program, original)
    hashes = {"original.cubin": hashlib.sha256(data).hexdigest()}
    if file is not None:
        hashes[file] = hashlib.sha256(_bytes(path / file)).hexdigest()
    recorded = run.record.settings.get("original_sha256")
    if recorded is not None and recorded != hashes["original.cubin"]:
        notes.append("original.cubin is not the file that run.json recorded (another sha256)")
    return LoadedRun(
        path=path,
        record=run.record,
        trials=tuple(run.trials()),
        episodes=_episodes(path, notes),
        program=program,
        original=original,
        candidate=candidate,
        what=what,
        file=file,
        launch=_launch(run, notes),
        provenance=_provenance(path, notes),
        hashes=hashes,
        notes=tuple(notes),
    )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRun(
            f"{path.parent} has no readable {path.name} ({error.strerror}); a run directory made "
            "by `nostall tune` holds it; run the tuning again"
        ) from error


def _program(data: bytes, path: Path) -> Program:
    try:
        return Program.from_cubin(data)
    except BadInput as error:
        raise BadRun(f"{path} cannot be read: {error}; run the tuning again") from error


def _kernel(program: Program, name: object, path: Path) -> Function:
    try:
        return program.kernel(name if isinstance(name, str) else None)
    except BadInput as error:
        raise BadRun(
            f"{path / 'run.json'}: settings.kernel is {name!r} but original.cubin has "
            f"{[f.name for f in program.kernels]}; the two must agree; run the tuning again"
        ) from error


def _candidate(run: Run, program: Program, original: Function) -> tuple[Function, str, str | None]:
    """The schedule to show beside the original: the result, what was refused, or the best yet."""
    for name, what in (("best.cubin", "best"), ("refused.cubin", "refused")):
        path = run.path / name
        if path.exists():
            try:
                aligned = align(program, _program(_bytes(path), path))
            except Mismatch as mismatch:
                raise BadRun(
                    f"{path} is not a re-scheduling of original.cubin ({mismatch.findings[0]}); "
                    "the two must come from one run; run the tuning again"
                ) from mismatch
            return aligned.function(original.name), what, name
    checkpoint = run.checkpoint()
    if checkpoint is None:
        raise BadRun(
            f"{run.path} holds neither best.cubin nor a checkpoint, so there is nothing to show "
            f"yet (status: {run.record.status}); let the run get further, or run the tuning again"
        )
    best = Schedule.load(checkpoint.best, len(original.instructions))
    return best.impose(original), "best so far", None


def _episodes(path: Path, notes: list[str]) -> tuple[Episode, ...]:
    try:
        return tuple(read_episodes(path / LOGS))
    except BadRun as error:
        notes.append(str(error))
        return ()


def _launch(run: Run, notes: list[str]) -> LaunchSpec | None:
    entry = run.record.settings.get("launch")
    if entry is None:
        return None
    try:
        return LaunchSpec.model_validate(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "launch"
        notes.append(f"the recorded launch cannot be used ({where}: {first['msg']})")
        return None


def _provenance(path: Path, notes: list[str]) -> Mapping[str, Any]:
    found = _json(path / "provenance.json", notes)
    return found if isinstance(found, dict) else {}


def _json(path: Path, notes: list[str]) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error})")
        return None
