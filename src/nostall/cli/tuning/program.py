"""``nostall tune app.py``: run a program, then tune its kernels with one budget."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from nostall.cli.options.inputs import DEFAULT_ARCH
from nostall.cli.terminal.console import Format, err, out, show_json, show_table
from nostall.core import BadInput
from nostall.core.measurement import Kind
from nostall.gpu import Kernel, LocalGpu
from nostall.sass.model.agreement import model_caution
from nostall.tuning.launches.recorded import read_launches
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source, missing_launch
from nostall.tuning.strategies import ASSEMBLER

if TYPE_CHECKING:
    from nostall.optimizing.records import Kept
    from nostall.store import Row
    from nostall.tuning.job import TuningResult
    from nostall.tuning.program import KernelResult, ProgramResult

PROGRAM_OPTIONS = (
    "target", "arguments", "arch", "strategy", "objective", "seed", "seconds", "evaluations",
    "out_dir", "store", "checks", "tolerance", "timing", "cold", "sanitizer", "measured_latencies",
    "native", "format", "quiet",
)  # fmt: skip
"""Parameters of the searches of a program."""
PROGRAM_REFUSAL = (
    "is for one kernel, and the target is a program, whose kernels are all tuned; leave it out, or "
    "give path.py:kernel"
)
TuneOne = Callable[[Source, Settings, Path | None], tuple["TuningResult", Path]]
"""Searches a kernel; returns the result and its run directory."""


@dataclass(frozen=True)
class ProgramInput:
    """The program to tune, as given on the command line."""

    words: tuple[str, ...]
    """The Python file and its arguments."""
    arch: str | None
    folder: Path | None
    """Parent of the run directories."""
    format: Format
    quiet: bool
    store: bool | None = None
    """``--store``: True keeps records without a proof in the program."""


def tune_program(program: ProgramInput, settings: Settings, tune_one: TuneOne) -> None:
    """Run the program, divide the seconds among its kernels, search them, and print a table."""
    from nostall.cli.record import run_recorded
    from nostall.store.artefacts import content_hash
    from nostall.tuning import program as job
    from nostall.tuning.room import Search

    if settings.objective == "recorded" or settings.seconds is None:
        raise BadInput(
            f"a program needs --objective gpu or model, and --seconds as the budget of all its "
            f"kernels, but they are {settings.objective} and {settings.seconds}"
        )
    with tempfile.TemporaryDirectory(prefix="nostall-") as scratch:
        log = Path(scratch) / "launches.jsonl"
        code = run_recorded([sys.executable, *program.words], log)
        launches = read_launches(log)
    command = shlex.join(program.words)
    if code:
        err.print(f"{command} ended with code {code}; what it launched before is tuned")
    time = partial(_launch_seconds, settings=settings)
    arch = program.arch or DEFAULT_ARCH
    kernels, refused = job.load_kernels(launches, arch, time)
    if not kernels:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise BadInput(
            f"{command} launched no kernel that can be tuned ({reasons or 'no launches were seen'})"
            "; see `nostall record -- PROGRAM`, or give path.py:kernel"
        )
    search: Search = "assembler" if settings.strategy == ASSEMBLER else "native moves"
    results = job.divide(settings.seconds, kernels, search)
    runs: list[Path] = []
    searched: set[str] = set()
    known = _records() if settings.objective == "gpu" and program.store is None else None

    def tune(source: Source, seconds: float) -> TuningResult:
        name = f"{len(runs) + 1:02}-{source.kernel[:40]}"
        folder = program.folder / name if program.folder is not None else None
        searched.add(content_hash(source.cubin))
        result, path = tune_one(source, replace(settings, seconds=seconds), folder)
        runs.append(path)
        return result

    interrupted = False
    starts = partial(job.find_starts, arch=arch, time=time, search=search)
    try:
        for result in job.search_kernels(results, starts, tune):
            if program.format is Format.TABLE and not program.quiet:
                out.print(f"{result.kernel.name}: {result.ratio:.4f}x")
    except KeyboardInterrupt:
        interrupted = True
    kind: Kind = "modelled" if settings.objective == "model" else "measured"
    whole = job.ProgramResult(tuple(results), tuple(refused), kind, interrupted)
    kept = None if known is None else _prove(program, whole, known, searched)
    _show(whole, runs, command, program.format, kept)


def _records() -> dict[str, Row]:
    """The records of the store by id; none if it cannot be used."""
    from nostall.store import BadStore, Store

    try:
        return {row.id: row for row in Store().rows()}
    except BadStore:
        return {}


def _prove(
    program: ProgramInput,
    result: ProgramResult,
    known: Mapping[str, Row],
    searched: Collection[str],
) -> Kept | None:
    """Keep the records of this run that make the whole program faster; None if it made none.

    ``searched``: sha256 of the binaries that it searched.  Another run may have added records of
    others meanwhile, which stay.
    """
    from nostall.optimizing.records import keep_proven
    from nostall.store.artefacts import content_hash

    rows = [row for id, row in _records().items() if id not in known and row.original in searched]
    if not rows:
        return None
    own = {content_hash(r.kernel.own.source.cubin) for r in result.kernels if r.kernel.own.is_own}
    words = [sys.executable, *program.words]
    return keep_proven(words, rows, own, lambda line: err.print(f"nostall: {line}"))


def _launch_seconds(source: Source, settings: Settings) -> float:
    """Seconds of one launch, by the objective of the settings."""
    from nostall.tuning.ptxas_versions import modelled_s

    if source.launch is None:
        raise missing_launch(source, "its time")
    if settings.objective == "model":
        return modelled_s(source, source.launch)
    kernel = Kernel(source.cubin, source.kernel, source.launch)
    with LocalGpu(kernel, settings.measurement_plan) as gpu:
        outcome = gpu.evaluate(source.cubin)
    if outcome.timing is None:
        raise BadInput(f"its launch cannot be timed: {outcome.status}: {outcome.detail}")
    return median(outcome.timing.original)


def _show(
    result: ProgramResult, runs: list[Path], command: str, format: Format, kept: Kept | None
) -> None:
    """Show the kernels; ``kept``: what the program's step says of their records."""
    if format is Format.JSON:
        records = None if kept is None else asdict(kept)
        document = {"program": command, **result.to_json(), "runs": list(map(str, runs))}
        show_json({**document, "records": records})
        return
    show_table(
        f"kernels of {command} ({result.kind})",
        ("kernel", "launches", "us", "share", "budget", "gain", "configuration"),
        [_row(kernel) for kernel in result.kernels],
    )
    for kernel in result.kernels:
        for note in kernel.notes:
            err.print(f"{kernel.kernel.name}: {note}")
    for name, reason in result.refused:
        err.print(f"not tuned: {name}: {reason}")
    ended = "; interrupted, kernels without a gain may not have been searched"
    out.print(
        f"all launches: {result.ratio:.4f}x ({result.kind} time of a launch, multiplied by the "
        f"launches){ended if result.interrupted else ''}"
    )
    for run in runs:
        out.print(f"run:      {run}")
    if result.kind == "modelled":
        err.print(model_caution())
    elif kept is not None:
        _show_kept(kept, command)
    elif any(kernel.best is not None for kernel in result.kernels):
        out.print(f"prove it: nostall optimize -- python {command}  (the whole program's step)")


def _show_kept(kept: Kept, command: str) -> None:
    if kept.others:
        out.print(
            f"not in the store: {kept.others} binaries of configurations that the program's "
            "autotuner did not choose; leave only such a configuration in its list, and tune again"
        )
    if kept.records:
        out.print(f"the whole program's step: {kept.reason}")
        out.print(f"use it:   nostall apply -- python {command}")
    elif kept.reason:
        out.print(
            f"not in the store, because the whole program's step is not proven faster: "
            f"{kept.reason}; --store keeps what was faster alone"
        )


def _row(result: KernelResult) -> tuple[str, ...]:
    kernel, best = result.kernel, result.best
    searched = "none faster" if result.found else "not searched"
    if not result.budget:
        searched += ": too small a part"
    return (
        kernel.name,
        str(kernel.launches),
        f"{1e6 * kernel.own.seconds:.2f}",
        f"{result.share:.1%}",
        f"{result.budget:.0f} s",
        f"{result.ratio:.4f}x" if best is not None else searched,
        str(best[0] if best is not None else kernel.own),
    )
