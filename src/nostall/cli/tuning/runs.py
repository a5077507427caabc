"""Run directories of ``nostall tune``: start, resume and discard them."""

from __future__ import annotations

import hashlib
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from nostall.cli.options.inputs import assemble_fastest, load_source, read_bytes
from nostall.core import BadInput, BadRun, LaunchSpec, Run
from nostall.core.errors import Interrupted
from nostall.core.files.folder_lock import LOCK_FILE
from nostall.tuning.settings import PTX_FILE, Settings, settings_of
from nostall.tuning.sources.source import Source
from nostall.tuning.strategies import POLICY_FILE

Number = TypeVar("Number", int, float)

ORIGINAL_FILE = "original.cubin"
RUNS_FOLDER = Path("runs")
"""Parent of run directories without ``--out``."""
_MAX_NAME_LENGTH = 40
_MAX_RUNS_PER_SECOND = 1000


@dataclass(frozen=True)
class TuneRun:
    """A run directory with its kernel and its settings."""

    run: Run
    source: Source
    settings: Settings


@dataclass(frozen=True)
class KernelInput:
    """The kernel to tune, as given on the command line."""

    target: str
    kernel: str | None
    launch: Path | None
    arch: str | None
    assemblers: bool
    """Start from the fastest cubin of all installed assemblers."""
    ptxas_options: str = ""


def start_run(
    kernel_input: KernelInput,
    complete: Callable[[Source], Settings],
    out_dir: Path | None,
) -> TuneRun:
    """Load the kernel and create a run directory: ``out_dir``, or a new one in ``runs``.

    ``complete`` gives the settings for a kernel, some of which depend on its source.
    """
    source = load_source(
        kernel_input.target,
        kernel_input.kernel,
        kernel_input.launch,
        kernel_input.arch,
        kernel_input.ptxas_options,
    )
    settings = complete(source)
    if kernel_input.assemblers:
        source = assemble_fastest(source, settings)
    return create_run(source, settings, out_dir)


def create_run(source: Source, settings: Settings, out_dir: Path | None) -> TuneRun:
    """Create a run directory for a compiled kernel: ``out_dir``, or a new one in ``runs``."""
    if out_dir is not None and (out_dir / "run.json").exists():
        raise BadRun(
            f"{out_dir} already holds a run; continue it with `{resume_command(out_dir)}`, or "
            "choose another directory with --out"
        )
    from nostall.tuning.job import describe

    path = out_dir or create_run_folder(source.kernel)
    command = shlex.join(["nostall", *sys.argv[1:]])
    files = {ORIGINAL_FILE: source.cubin}
    if source.ptx is not None:
        files[PTX_FILE] = source.ptx.encode()
    if settings.policy is not None:
        files[POLICY_FILE] = read_bytes(settings.policy)
    run = Run.create(path, command, describe(source, settings), files)
    return TuneRun(run, source, settings)


def reopen_run(
    path: Path, seconds: float | None, evaluations: int | None, workers: int | None
) -> TuneRun:
    """Open an earlier run to resume it.

    ``seconds`` and ``evaluations`` are limits of what this run does *more*.  Without both, what is
    left of the earlier limits holds.  ``workers`` replaces that of the run if it is given.  Raises
    :class:`BadInput` if the directory cannot be resumed, or if the run is done and gets no limit.
    """
    run = Run.open(path)
    saved = run.record.settings
    has_new_limits = seconds is not None or evaluations is not None
    if run.record.status == "done" and not has_new_limits:
        raise BadInput(
            f"the run in {path} is done and its limits are spent; give --seconds or --evaluations "
            f"to search more, or see `{shlex.join(['nostall', 'report', str(path)])}`"
        )
    try:
        data = (path / ORIGINAL_FILE).read_bytes()
        if hashlib.sha256(data).hexdigest() != saved["original_sha256"]:
            raise ValueError(f"{ORIGINAL_FILE} is not the file that the run started with")
        launch = LaunchSpec.model_validate(saved["launch"]) if saved.get("launch") else None
        ptx = (path / PTX_FILE).read_text() if (path / PTX_FILE).exists() else None
        provenance = dict(saved["provenance"])
        source = Source(data, saved["kernel"], launch, saved["origin"], provenance, ptx)
        settings = settings_of(saved)
        workers = workers or settings.workers
        policy = path / POLICY_FILE if settings.policy else None
        settings = replace(settings, workers=workers, policy=policy)
        spent = _spent(run, workers)
        if has_new_limits:
            settings = replace(
                settings,
                seconds=_total(seconds, spent.seconds),
                evaluations=_total(evaluations, spent.evaluations),
            )
        _ = settings.budget  # raises BadInput if the limits are not positive
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput(f"{path} cannot be resumed ({error}); start a new run") from error
    return TuneRun(run, source, settings)


class _Spent(NamedTuple):
    """What a run has spent of its limits, which are totals over all its parts."""

    seconds: float
    evaluations: int


def _spent(run: Run, workers: int | None) -> _Spent:
    """What the last checkpoint says; nothing for several workers, whose searches start anew."""
    checkpoint = run.checkpoint() if (workers or 1) == 1 else None
    if checkpoint is None:
        return _Spent(0.0, 0)
    return _Spent(float(checkpoint.memory.get("seconds", 0.0)), checkpoint.evaluations)


def _total(more: Number | None, spent: Number) -> Number | None:
    return None if more is None else spent + more


def resume_command(path: Path) -> str:
    """The command line that continues the run in ``path``."""
    return shlex.join(["nostall", "tune", "--resume", str(path)])


def kept_after_interrupt(run: Run) -> Interrupted:
    """The error of a second Ctrl-C: what the run directory keeps, and how to go on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # another one would end this message
    if run.record.result is not None:
        return Interrupted(
            f"interrupted after the search; {run.path} keeps the result, and "
            f"`{shlex.join(['nostall', 'report', str(run.path)])}` writes its report"
        )
    try:
        checkpoint = run.checkpoint()
    except BadRun:
        checkpoint = None
    if checkpoint is None:
        return Interrupted("interrupted before the first checkpoint; nothing is kept")
    return Interrupted(
        f"interrupted before the best schedule was verified; {run.path} keeps "
        f"{checkpoint.evaluations} evaluations and the best schedule so far; go on with "
        f"`{resume_command(run.path)}`"
    )


@contextmanager
def discard_if_empty(run: Run, *, is_new: bool, useless: Sequence[str] = ()) -> Iterator[None]:
    """Delete a new run directory if the job fails before its first trial.

    ``useless``: files of the job that nothing can go on with.
    """
    initial_files = ("run.json", ORIGINAL_FILE, PTX_FILE, POLICY_FILE, LOCK_FILE, *useless)
    try:
        yield
    except BaseException:  # raised again; Ctrl-C, too, must leave no empty directory
        files = {path.name for path in run.path.iterdir()}
        if is_new and files <= {*initial_files} and run.record.status == "running":
            for name in initial_files:
                (run.path / name).unlink(missing_ok=True)
            with suppress(OSError):
                run.path.rmdir()
                if run.path.parent == RUNS_FOLDER:
                    RUNS_FOLDER.rmdir()  # if it holds no other run
        raise


def create_run_folder(kernel: str) -> Path:
    """Create a folder for a run, named by time and kernel.

    Processes that start in the same second get folders with different suffixes.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in kernel)[:_MAX_NAME_LENGTH]
    for suffix in ("", *(f"-{n}" for n in range(2, _MAX_RUNS_PER_SECOND))):
        path = RUNS_FOLDER / f"{stamp}-{name}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BadRun(
                f"cannot create {path}: {error.strerror}; choose a writable directory with --out"
            ) from error
        return path
    raise BadRun(f"{RUNS_FOLDER} has too many runs of this second; give --out DIRECTORY")
