"""Data of a run directory that the report shows: both schedules, trials, settings and result."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from nostall.core import BadInput, BadRun, LaunchSpec, Run, Trial
from nostall.core.run import RunRecord
from nostall.core.validation import first_problem, parse_json
from nostall.sass import Function, Program
from nostall.sass.safety.structure import Mismatch, align
from nostall.sass.schedule import Schedule
from nostall.search.episodes import Episode, read_episodes
from nostall.tuning.settings import UNSAFE_CUBIN_FILE
from nostall.tuning.strategies import LOG_FOLDER

BEST, REJECTED, BEST_SO_FAR = "best", "rejected", "best so far"
"""Names of candidates: the result, an unsafe cubin, and the best of a search that has not ended."""


@dataclass(frozen=True)
class RunData:
    """Contents of a run directory; ``original`` and ``candidate`` are schedules of one kernel."""

    path: Path
    record: RunRecord
    trials: tuple[Trial, ...]
    episodes: tuple[Episode, ...]
    """Episodes of a learning strategy."""
    program: Program
    original: Function
    candidate: Function
    candidate_name: str
    """``BEST``, ``REJECTED`` or ``BEST_SO_FAR``."""
    launch: LaunchSpec | None
    provenance: Mapping[str, Any]
    """Contents of ``provenance.json``."""
    hashes: Mapping[str, str]
    """sha256 of the cubin files, by name."""
    notes: tuple[str, ...]
    """Remarks on parts that cannot be used."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the run."""
        return self.record.settings

    @property
    def result(self) -> Mapping[str, Any]:
        """Result of the run; empty if it has not ended."""
        return self.record.result or {}


def load_run(path: Path) -> RunData:
    """Read a run directory.

    Trials, launch, episodes and provenance may be missing.  Raises :class:`BadRun` if another part
    is missing or cannot be used.
    """
    run = Run.open(path)
    notes: list[str] = []
    data = _read_bytes(path / "original.cubin")
    program = _parse(data, path / "original.cubin")
    original = _find_kernel(program, run.record.settings.get("kernel"), path)
    candidate, name, file = _load_candidate(run, program, original)
    hashes = {"original.cubin": hashlib.sha256(data).hexdigest()}
    if file is not None:
        hashes[file] = hashlib.sha256(_read_bytes(path / file)).hexdigest()
    log = run.trial_log()
    notes += log.remarks
    recorded_hash = run.record.settings.get("original_sha256")
    if recorded_hash is not None and recorded_hash != hashes["original.cubin"]:
        notes.append("original.cubin is not the file that run.json recorded (another sha256)")
    return RunData(
        path=path,
        record=run.record,
        trials=log.trials,
        episodes=_load_episodes(path, notes),
        program=program,
        original=original,
        candidate=candidate,
        candidate_name=name,
        launch=_load_launch(run, notes),
        provenance=_load_provenance(path, notes),
        hashes=hashes,
        notes=tuple(notes),
    )


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRun(
            f"{path.parent} has no readable {path.name} ({error.strerror}); a run directory of "
            "`nostall tune` has it; run the tuning again"
        ) from error


def _parse(data: bytes, path: Path) -> Program:
    try:
        return Program.from_cubin(data)
    except BadInput as error:
        raise BadRun(f"{path} cannot be read: {error}; run the tuning again") from error


def _find_kernel(program: Program, name: object, path: Path) -> Function:
    try:
        return program.kernel(name if isinstance(name, str) else None)
    except BadInput as error:
        raise BadRun(
            f"{path / 'run.json'}: settings.kernel is {name!r} but original.cubin has "
            f"{[f.name for f in program.kernels]}; the two must agree; run the tuning again"
        ) from error


def _load_candidate(
    run: Run, program: Program, original: Function
) -> tuple[Function, str, str | None]:
    """The schedule to compare with the original, its name and its file.

    It is the result, else the unsafe cubin that the verifier rejected, else the best so far.
    """
    for file, name in (("best.cubin", BEST), (UNSAFE_CUBIN_FILE, REJECTED)):
        path = run.path / file
        if path.exists():
            try:
                aligned = align(program, _parse(_read_bytes(path), path))
            except Mismatch as mismatch:
                raise BadRun(
                    f"{path} is not a re-scheduling of original.cubin ({mismatch.findings[0]}); "
                    "both files must be of the same run; run the tuning again"
                ) from mismatch
            return aligned.function(original.name), name, file
    checkpoint = run.checkpoint()
    if checkpoint is None:
        raise BadRun(
            f"{run.path} has neither best.cubin nor a checkpoint, so there is nothing to show yet "
            f"(status: {run.record.status}); wait for the first checkpoint, or run the tuning again"
        )
    best = Schedule.load(checkpoint.best, len(original.instructions))
    return best.impose(original), BEST_SO_FAR, None


def _load_episodes(path: Path, notes: list[str]) -> tuple[Episode, ...]:
    try:
        return tuple(read_episodes(path / LOG_FOLDER))
    except BadRun as error:
        notes.append(str(error))
        return ()


def _load_launch(run: Run, notes: list[str]) -> LaunchSpec | None:
    record = run.record.settings.get("launch")
    if record is None:
        return None
    try:
        return LaunchSpec.model_validate(record)
    except ValidationError as error:
        notes.append(f"the recorded launch cannot be used ({first_problem(error, 'launch')})")
        return None


def _load_provenance(path: Path, notes: list[str]) -> Mapping[str, Any]:
    provenance = _load_json(path / "provenance.json", notes)
    return provenance if isinstance(provenance, dict) else {}


def _load_json(path: Path, notes: list[str]) -> Any:
    if not path.exists():
        return None
    try:
        return parse_json(path.read_text())
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error})")
        return None
