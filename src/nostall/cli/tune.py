"""``nostall tune``: the main job."""

from __future__ import annotations

import hashlib
import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.console import Format, FormatOption, QuietOption, err, out, show_json
from nostall.cli.inputs import ArchOption, best_assembled, read_bytes
from nostall.cli.inputs import source as read_source
from nostall.cli.interruption import Interruption
from nostall.cli.measuring import measuring
from nostall.cli.measuring_options import (
    ChecksOption,
    ColdOption,
    SanitizerOption,
    TimingOption,
    ToleranceOption,
    clock,
    enough,
)
from nostall.cli.measuring_options import tolerance as read_tolerance
from nostall.cli.progress import Progress
from nostall.core import BadInput, BadRun, LaunchSpec, Run, Tolerance
from nostall.gpu import sanitizer as compute_sanitizer
from nostall.report import write_report
from nostall.sass.model.agreement import model_caution
from nostall.store import BadStore, Row, Store
from nostall.tuning.assemblers import ASSEMBLER
from nostall.tuning.job import Settings, Tuned, describe
from nostall.tuning.job import tune as run_job
from nostall.tuning.source import Source
from nostall.tuning.store_records import record
from nostall.tuning.strategies import LOGS, POLICY
from nostall.tuning.strategies import strategy as strategy_named


def tune(
    target: Annotated[
        str | None, typer.Argument(help="A cubin, a fatbin, or path.py:kernel for a Triton kernel.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="Which kernel, when there are several.")
    ] = None,
    launch: Annotated[Path | None, typer.Option(help="Launch specification (TOML).")] = None,
    arch: ArchOption = None,
    strategy: Annotated[
        str | None,
        typer.Option(help="anneal (usual), sip, random; cuasmrl, ppo (learn; extra nostall[rl])."),
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="Begin with this policy file of `nostall train` (ppo).")
    ] = None,
    objective: Annotated[
        str, typer.Option(help="model (no GPU needed) or gpu (measure every candidate).")
    ] = "model",
    seed: Annotated[int, typer.Option(help="Same seed and evaluations: same result.")] = 0,
    seconds: Annotated[float | None, typer.Option(help="Stop after so many seconds.")] = None,
    evaluations: Annotated[int | None, typer.Option(help="Stop after so many evaluations.")] = None,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run directory to make.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run directory.")] = None,
    store: Annotated[
        bool | None,
        typer.Option(
            "--store/--no-store", help="Keep a gain in the store (measured ones: on by default)."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Searches side by side, one per GPU; limits hold for each.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Use the workers of this Dask scheduler (tcp://host:port).")
    ] = None,
    assemblers: Annotated[
        bool,
        typer.Option(
            "--assemblers",
            help="Assemble a Triton kernel's PTX with every ptxas that is here, and start from the "
            "fastest.",
        ),
    ] = False,
    checks: ChecksOption = 16,
    tolerance: ToleranceOption = None,
    timing: TimingOption = "graph",
    cold: ColdOption = False,
    sanitizer: SanitizerOption = False,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Search for a faster schedule of one kernel, prove it safe, and write it back.

    Ctrl-C keeps the best schedule found so far.
    """
    if resume is not None:
        run, source, settings = _reopen(resume, seconds, evaluations, workers)
        _check(settings, scheduler)
    else:
        if target is None:
            raise BadInput("nothing to tune; give a .cubin, path.py:kernel, or --resume RUN")
        if seconds is None and evaluations is None:
            seconds = 60.0
        settings = Settings(
            strategy or ("ppo" if policy else "anneal"),
            seed,
            seconds,
            evaluations,
            objective=objective,
            workers=workers,
            checks=enough(checks),
            clock=clock(timing),
            cold=cold,
            tolerance=read_tolerance(tolerance),
            sanitizer=sanitizer,
            policy=policy,
        )
        _check(settings, scheduler)
        source = read_source(target, kernel, launch, arch)
        if assemblers:
            source = best_assembled(source, settings)
        place = out_dir or _fresh(source.kernel)
        line = shlex.join(["nostall", *sys.argv[1:]])
        files = {"original.cubin": source.cubin}
        if policy is not None:
            files[POLICY] = read_bytes(policy)
        run = Run.create(place, line, describe(source, settings), files)
    bar = Progress(settings.budget, enabled=not quiet and format is Format.TABLE)
    with (
        _discarded_if_empty(run, fresh=resume is None),
        run,
        measuring(source, settings, scheduler, run.path / LOGS) as (search, device),
        bar,
        Interruption() as interruption,
    ):
        tuned = run_job(
            source,
            search,
            settings,
            run=run,
            observers=[bar, interruption],
            resume=resume is not None,
            device=device,
        )
        row = _keep(source, settings, tuned, device.info if device else None, store)
    page = write_report(run.path)
    _show(source, settings, tuned, run, page, row, format)


def _reopen(
    path: Path, seconds: float | None, evaluations: int | None, workers: int | None
) -> tuple[Run, Source, Settings]:
    """The run, the source and the settings of an earlier run; limits given anew replace its."""
    run = Run.open(path)
    saved = run.record.settings
    try:
        data = (path / "original.cubin").read_bytes()
        if hashlib.sha256(data).hexdigest() != saved["original_sha256"]:
            raise ValueError("original.cubin is not the file that the run began with")
        spec = LaunchSpec.model_validate(saved["launch"]) if saved.get("launch") else None
        source = Source(data, saved["kernel"], spec, saved["origin"], dict(saved["provenance"]))
        near = saved.get("tolerance")
        anew = seconds is not None or evaluations is not None
        settings = Settings(
            saved["strategy"],
            int(saved["seed"]),
            seconds if anew else saved["seconds"],
            evaluations if anew else saved["evaluations"],
            int(saved["assumed_trips"]),
            saved["objective"],
            workers=workers or saved.get("workers"),
            rounds=saved.get("rounds", Settings.rounds),
            checks=saved.get("checks", Settings.checks),
            clock=clock(saved.get("clock", Settings.clock)),
            cold=saved.get("cold", False),
            tolerance=Tolerance.model_validate(near) if near else None,
            sanitizer=saved.get("sanitizer", False),
            policy=path / POLICY if saved.get("policy") else None,
        )
        _ = settings.budget
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{path} cannot be resumed ({error}); start the run anew") from error
    return run, source, settings


def _check(settings: Settings, scheduler: str | None) -> None:
    """Refuse what could never work before anything is compiled or written."""
    strategy_named(settings.strategy, policy=settings.policy)
    if settings.objective not in ("model", "gpu"):
        raise BadInput(f"--objective is {settings.objective!r}; give model or gpu")
    if settings.workers is not None and settings.workers < 1:
        raise BadInput(f"--workers is {settings.workers}; give 1 or more, one per GPU")
    if settings.objective != "gpu" and (scheduler is not None or (settings.workers or 1) > 1):
        raise BadInput("--workers and --scheduler spread measuring; give --objective gpu as well")
    if settings.seconds is not None and math.isnan(settings.seconds):
        raise BadInput("--seconds is not a number; give how many seconds to search, such as 60")
    asked = settings.tolerance or settings.sanitizer or settings.cold or settings.clock != "graph"
    if settings.objective != "gpu" and asked:
        raise BadInput(
            "--tolerance, --timing, --cold and --sanitizer say how a GPU measures; give "
            "--objective gpu as well"
        )
    if settings.sanitizer:
        compute_sanitizer.find()
    if settings.seed < 0:
        raise BadInput(f"--seed is {settings.seed}; give 0 or a greater whole number")
    _ = settings.budget


@contextmanager
def _discarded_if_empty(run: Run, *, fresh: bool) -> Iterator[None]:
    """Take away a new run directory when the job ends before its first trial."""
    made = ("run.json", "original.cubin", POLICY)
    try:
        yield
    except BaseException:
        there = {path.name for path in run.path.iterdir()}
        if fresh and there <= {*made} and run.record.status == "running":
            for name in made:
                (run.path / name).unlink(missing_ok=True)
            with suppress(OSError):
                run.path.rmdir()
        raise


def _keep(
    source: Source,
    settings: Settings,
    tuned: Tuned,
    about: Mapping[str, str] | None,
    wanted: bool | None,
) -> Row | None:
    """Record a gain; measured ones (``about`` a GPU) unless refused, modelled ones when asked.

    Where nobody asked, a store that does not work spoils no run.
    """
    if tuned.improved and ASSEMBLER in source.provenance:
        err.print(
            "not kept in the store: programs load the compiler's own binary, and this one started "
            "from another assembler's; use nostall.load(best.cubin)"
        )
        return None
    wanted_by_default = wanted is None and about is not None
    if not tuned.improved or not (wanted or wanted_by_default):
        return None
    try:
        return record(Store(), source, settings, tuned, about or {})
    except BadStore as error:
        if wanted:
            raise
        err.print(f"not kept in the store: {error}")
        return None


def _fresh(kernel: str) -> Path:
    """Make a run directory that no other process of this second has."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in kernel)[:40]
    for ending in ("", *(f"-{n}" for n in range(2, 1000))):
        place = Path("runs") / f"{stamp}-{name}{ending}"
        try:
            place.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise BadRun(
                f"cannot make {place}: {error.strerror}; choose a writable directory with --out"
            ) from error
        return place
    raise BadRun(f"there are too many runs in {place.parent}; give --out DIRECTORY")


def _show(
    source: Source,
    settings: Settings,
    tuned: Tuned,
    run: Run,
    page: Path,
    row: Row | None,
    format: Format,
) -> None:
    if format is Format.JSON:
        assert run.record.result is not None
        kept = {"record": row.id if row is not None else None}
        show_json({"run": str(run.path), "kernel": source.kernel, **kept, **run.record.result})
        return
    found = tuned.search
    before = found.start_measurement
    out.print(
        f"{source.kernel} ({settings.strategy}, seed {settings.seed}): "
        f"{found.evaluations} evaluations, {found.rejected} illegal proposals, "
        f"{found.seconds:.1f} s, stopped: {found.stopped}"
    )
    if tuned.improved:
        out.print(
            f"{before.kind} gain: {tuned.ratio:.4f}x{_interval(tuned)}  ({before.kind} "
            f"{before.value * 1e6:.3f} us -> {before.value / tuned.ratio * 1e6:.3f} us; "
            f"{tuned.moved} positions changed, {tuned.retimed} control words changed)"
        )
    else:
        out.print(
            f"nothing better than the original was found ({before.kind}{_interval(tuned)}); "
            "it is kept"
        )
    if starts := source.provenance.get("starts"):
        out.print(f"starts:   {starts}; searched from {source.provenance.get(ASSEMBLER, 'it')}")
    out.print(f"verifier: safe ({tuned.verdict.checked} instructions, both halves)")
    if tuned.decision is not None and tuned.decision.comparison is not None:
        near = f"within {settings.tolerance}" if settings.tolerance else "bit by bit"
        out.print(f"outputs:  equal to the original's {near} on {settings.checks} random inputs")
    for tool, said in tuned.sanitized.items():
        out.print(f"{tool + ':':<9} {said.answer}{': ' if said.detail else ''}{said.detail}")
    out.print(f"report:   {page}")
    if before.kind == "modelled":
        err.print(model_caution())
    out.print(f"next:     nostall verify {run.path / 'original.cubin'} {run.path / 'best.cubin'}")
    if row is not None:
        told = "--modelled " if row.kind == "modelled" else ""
        out.print(
            f"use it:   nostall apply {told}-- python your_program.py  (record {row.id[:12]})"
        )


def _interval(tuned: Tuned) -> str:
    """The 95 % interval of a measured ratio and the null's."""
    compared = tuned.decision.comparison if tuned.decision is not None else None
    if compared is None:
        return ""
    return (
        f" [{compared.low:.4f}, {compared.high:.4f}], null "
        f"[{compared.null_low:.4f}, {compared.null_high:.4f}]"
    )
