"""The command ``nostall tune``: search for a faster instruction schedule of a kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.compile_time import measured_compile_time
from nostall.cli.console import Format, FormatOption, QuietOption, err
from nostall.cli.given_options import refuse_all_but, refuse_options
from nostall.cli.inputs import TARGET_HELP, ArchOption, KernelOption, LaunchOption
from nostall.cli.interruption import Interruption
from nostall.cli.measuring_options import (
    ChecksOption,
    ColdOption,
    SanitizerOption,
    TimingOption,
    ToleranceOption,
    parse_timing,
    parse_tolerance,
    require_checks,
)
from nostall.cli.progress import SearchProgress
from nostall.cli.search_setup import open_search
from nostall.cli.tune_output import show_result
from nostall.cli.tune_runs import (
    KernelInput,
    TuneRun,
    discard_if_empty,
    kept_after_interrupt,
    reopen_run,
    start_run,
)
from nostall.core import BadInput
from nostall.core.suggest import unknown
from nostall.gpu import sanitizer as compute_sanitizer
from nostall.report import write_report
from nostall.store import BadStore, Row, Store
from nostall.tuning.job import Settings, TuningResult
from nostall.tuning.job import tune as run_job
from nostall.tuning.ptxas_versions import ASSEMBLER_KEY
from nostall.tuning.source import Source
from nostall.tuning.store_records import record_result
from nostall.tuning.strategies import LOG_FOLDER, make_strategy

DEFAULT_SECONDS = 60.0
"""Time limit of a search without any limit."""

_RESUME_OPTIONS = (
    "resume",
    "seconds",
    "evaluations",
    "workers",
    "scheduler",
    "store",
    "format",
    "quiet",
)
"""Parameters that a resumed run honours."""

TargetArgument = Annotated[str | None, typer.Argument(help=TARGET_HELP)]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        help="anneal (default), sip or random; cuasmrl and ppo learn, and need "
        "`pip install 'nostall[rl]'`."
    ),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(help="Policy file of `nostall train` to start with; the strategy is then ppo."),
]
ObjectiveOption = Annotated[
    str, typer.Option(help="model (needs no GPU) or gpu (measures every candidate).")
]
SeedOption = Annotated[
    int,
    typer.Option(
        help="Random seed; with the model, the same seed and number of evaluations give the same "
        "result."
    ),
]
SecondsOption = Annotated[
    float | None,
    typer.Option(
        help=f"Time limit of the search; default: {DEFAULT_SECONDS:g} if no limit is set. With "
        "`--resume`: seconds more."
    ),
]
EvaluationsOption = Annotated[
    int | None,
    typer.Option(help="Maximum number of evaluated schedules. With `--resume`: so many more."),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Run directory to create; default: a new one in runs/."),
]
ResumeOption = Annotated[Path | None, typer.Option(help="Continue the run in this directory.")]
StoreOption = Annotated[
    bool | None,
    typer.Option(
        "--store/--no-store", help="Record a gain in the store; default: measured gains only."
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option(help="Parallel searches, one per GPU; limits hold for each.")
]
SchedulerOption = Annotated[
    str | None, typer.Option(help="Use the workers of this Dask scheduler (tcp://host:port).")
]
AssemblersOption = Annotated[
    bool,
    typer.Option(
        "--assemblers",
        help="Assemble a Triton kernel with each installed ptxas; start from the fastest cubin.",
    ),
]


def tune(
    context: typer.Context,
    target: TargetArgument = None,
    kernel: KernelOption = None,
    launch: LaunchOption = None,
    arch: ArchOption = None,
    strategy: StrategyOption = None,
    policy: PolicyOption = None,
    objective: ObjectiveOption = "model",
    seed: SeedOption = 0,
    seconds: SecondsOption = None,
    evaluations: EvaluationsOption = None,
    out_dir: OutOption = None,
    resume: ResumeOption = None,
    store: StoreOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    assemblers: AssemblersOption = False,
    checks: ChecksOption = 16,
    tolerance: ToleranceOption = None,
    timing: TimingOption = "graph",
    cold: ColdOption = False,
    sanitizer: SanitizerOption = False,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Search for a faster instruction schedule of a kernel.

    The verifier checks the result; if it is unsafe or no faster, the original is kept. Ctrl-C ends
    the search and keeps the best schedule so far.
    """
    check_limits(seconds, evaluations)
    if resume is not None:
        refuse_all_but(
            context,
            _RESUME_OPTIONS,
            "cannot be given with --resume: the run goes on with its own kernel and settings; "
            "leave it out, or start a new run",
        )
        run = reopen_run(resume, seconds, evaluations, workers)
        check_settings(run.settings, scheduler)
    else:
        if target is None:
            raise BadInput("nothing to tune; give a .cubin, path.py:kernel, or --resume RUN")
        if objective == "model":
            refuse_options(
                context,
                ("checks",),
                "is the number of random inputs of a measurement; give --objective gpu as well",
            )
        if seconds is None and evaluations is None:
            seconds = DEFAULT_SECONDS
        settings = Settings(
            strategy or ("ppo" if policy else "anneal"),
            seed,
            seconds,
            evaluations,
            objective=objective,
            workers=workers,
            checks=require_checks(checks),
            clock=parse_timing(timing),
            cold=cold,
            tolerance=parse_tolerance(tolerance),
            sanitizer=sanitizer,
            policy=policy,
        )
        check_settings(settings, scheduler)
        run = start_run(KernelInput(target, kernel, launch, arch, assemblers), settings, out_dir)
    _tune(run, scheduler, store, _Output(format, quiet), resume=resume is not None)


def check_limits(seconds: float | None, evaluations: int | None) -> None:
    """Raise :class:`BadInput`, which names the option, for a limit that is not above 0."""
    if seconds is not None and not 0 < seconds < math.inf:
        raise BadInput(
            f"--seconds is {seconds:g}; give a number of seconds greater than 0, such as 60 "
            "(Ctrl-C ends a search at any time)"
        )
    if evaluations is not None and evaluations < 1:
        raise BadInput(
            f"--evaluations is {evaluations}; give a whole number greater than 0, such as 1000"
        )


@dataclass(frozen=True)
class _Output:
    """Output options."""

    format: Format
    quiet: bool


def _tune(
    tune_run: TuneRun, scheduler: str | None, store: bool | None, output: _Output, *, resume: bool
) -> None:
    """Run the search, record a gain in the store, write the report and print the result."""
    run, source, settings = tune_run.run, tune_run.source, tune_run.settings
    is_shown = output.format is Format.TABLE and not output.quiet
    bar = SearchProgress(settings.budget, enabled=is_shown)
    notice = "ending the search; the best schedule is verified now (Ctrl-C again leaves at once)"
    with (
        discard_if_empty(run, is_new=not resume),
        run,
        measured_compile_time() as compilation,
    ):
        if resume:
            limits = {"seconds": settings.seconds, "evaluations": settings.evaluations}
            run.restart({**run.record.settings, **limits, "workers": settings.workers})
        try:
            with (
                open_search(source, settings, scheduler, run.path / LOG_FOLDER) as (search, device),
                bar,
                Interruption(notice) as interruption,
            ):
                result = run_job(
                    source,
                    search,
                    settings,
                    run=run,
                    observers=[bar, interruption],
                    resume=resume,
                    device=device,
                )
                info = device.info if device else None
                row = store_gain(source, settings, result, info, store)
        except KeyboardInterrupt as error:
            raise kept_after_interrupt(run) from error
    page = write_report(run.path)
    compilation.show()
    show_result(tune_run, result, page, row, output.format)


def check_settings(settings: Settings, scheduler: str | None) -> None:
    """Raise an error for settings that cannot work, before anything is compiled or written."""
    make_strategy(settings.strategy, policy=settings.policy)
    if settings.objective not in ("model", "gpu"):
        raise BadInput(unknown("--objective", settings.objective, ("model", "gpu")))
    if settings.workers is not None and settings.workers < 1:
        raise BadInput(f"--workers is {settings.workers}; give 1 or more, one per GPU")
    if settings.objective != "gpu" and (scheduler is not None or (settings.workers or 1) > 1):
        raise BadInput(
            "--workers and --scheduler distribute measurements; give --objective gpu as well"
        )
    is_cold_or_timed = settings.cold or settings.clock != "graph"
    if settings.objective != "gpu" and (
        settings.tolerance or settings.sanitizer or is_cold_or_timed
    ):
        raise BadInput(
            "--tolerance, --timing, --cold and --sanitizer are options of measurements; give "
            "--objective gpu as well"
        )
    if settings.sanitizer:
        compute_sanitizer.find()
    if settings.seed < 0:
        raise BadInput(f"--seed is {settings.seed}; give 0 or a greater whole number")
    _ = settings.budget  # raises BadInput if the limits are not positive


def store_gain(
    source: Source,
    settings: Settings,
    result: TuningResult,
    device_info: Mapping[str, str] | None,
    requested: bool | None,
) -> Row | None:
    """Record a gain in the store; returns its row, or None if nothing was recorded.

    ``requested`` is the option ``--store``.  By default a gain is recorded if it was measured
    (``device_info`` is not None); an unusable store is then only a warning.
    """
    if result.improved and ASSEMBLER_KEY in source.provenance:
        err.print(
            "not recorded in the store: programs load the compiler's own cubin, but this result "
            "starts from the cubin of another ptxas; use nostall.load(best.cubin)"
        )
        return None
    is_wanted = requested or (requested is None and device_info is not None)
    if not result.improved or not is_wanted:
        return None
    try:
        return record_result(Store(), source, settings, result, device_info or {})
    except BadStore as error:
        if requested:
            raise
        err.print(f"not recorded in the store: {error}")
        return None
