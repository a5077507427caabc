"""The command ``nostall tune``: search for a faster way to run a kernel's instructions."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nostall.cli.options.given_options import (
    NO_CONTEXT,
    GivenContext,
    given_words,
    refuse_all_but,
    repeated_command,
)
from nostall.cli.options.inputs import (
    TARGET_HELP,
    ArchOption,
    KernelOption,
    LaunchOption,
    MeasuredLatenciesOption,
    PtxasOptionsOption,
)
from nostall.cli.options.measuring_options import (
    ChecksOption,
    ColdOption,
    SanitizerOption,
    TimingOption,
    ToleranceOption,
    parse_timing,
    parse_tolerance,
    require_checks,
)
from nostall.cli.terminal.console import Format, FormatOption, QuietOption, err
from nostall.cli.terminal.progress import Interruption, SearchProgress, measured_compile_time
from nostall.cli.tuning.checks import check_files, check_limits, check_settings
from nostall.cli.tuning.output import show_result
from nostall.cli.tuning.program import (
    PROGRAM_OPTIONS,
    PROGRAM_REFUSAL,
    ProgramInput,
    tune_program,
)
from nostall.cli.tuning.runs import (
    KernelInput,
    TuneRun,
    create_run,
    discard_if_empty,
    kept_after_interrupt,
    reopen_run,
    start_run,
)
from nostall.core import BadInput, Observer, Search
from nostall.gpu import Device, Kernel, LocalGpu
from nostall.sass.model.agreement import RANKING_WORTH
from nostall.store import BadStore, Row, Store
from nostall.tuning.nominal_work import NOMINAL_TFLOPS, SIP
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import ASSEMBLER_KEY, Source, missing_launch
from nostall.tuning.strategies import ASSEMBLER, LOG_FOLDER, complete_choice, make_strategy

if TYPE_CHECKING:
    from nostall.tuning.job import TuningResult


def store_gain(
    source: Source,
    settings: Settings,
    result: TuningResult,
    device_info: Mapping[str, str] | None,
    requested: bool | None,
) -> Row | None:
    """Record a gain in the store; returns its row, or None if nothing was recorded.

    ``requested`` is the option ``--store``.  By default a gain is recorded if it was measured
    (``device_info`` is not None); an unusable store is then only a warning.  A gain of dependent
    launches is a record of its own.
    """
    from nostall.tuning.records.store_records import record_dependent, record_result

    if result.improved and ASSEMBLER_KEY in source.provenance:
        err.print(
            "not recorded in the store: programs load the compiler's own cubin, but this result "
            "starts from the cubin of another ptxas; use nostall.load(best.cubin)"
        )
        return None
    is_wanted = requested or (requested is None and device_info is not None)
    has_chain_gain = result.dependent is not None and result.dependent.improved
    if not (result.improved or has_chain_gain) or not is_wanted:
        return None
    row: Row | None = None
    try:
        store = Store()
        if result.improved:
            row = record_result(store, source, settings, result, device_info or {})
        if has_chain_gain:
            dependent = record_dependent(store, source, settings, result, device_info or {})
            row = row or dependent
    except BadStore as error:
        if requested:
            raise
        err.print(f"not recorded in the store: {error}")
    return row


@contextmanager
def open_search(
    source: Source, settings: Settings, scheduler: str | None, logs: Path | None = None
) -> Iterator[tuple[Search, Device | None]]:
    """Open the search and the device for ``settings``; no device for a modelled objective.

    ``scheduler`` is the address of a Dask scheduler; without one and without several workers, the
    first GPU of this machine measures.  ``logs`` is the folder for the curves of a learning
    strategy.
    """
    search = make_strategy(settings.strategy, logs=logs, policy=settings.policy)
    if settings.objective != "gpu":
        yield search, None
        return
    if source.launch is None:
        raise missing_launch(source, "measuring")
    kernel, workers = Kernel(source.cubin, source.kernel, source.launch), settings.workers
    if scheduler is None and (workers is None or workers == 1):
        with LocalGpu(kernel, settings.measurement_plan) as gpu:
            yield search, gpu
        return
    from nostall import farm
    from nostall.tuning.farm_search import ParallelChains

    spec = farm.DeviceSpec(kernel, settings.measurement_plan)
    with farm.remote(scheduler, workers) if scheduler else farm.local(workers or 1) as pool:
        try:
            yield ParallelChains(search, pool, spec), farm.FarmDevice(pool, spec)
        finally:
            pool.run_on_all(farm.close_device, spec)


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

_RESUMED = ("workers", "scheduler", "store")
"""Parameters that a resumed run takes from its own command line only."""

_MEASURED = {"objective": "gpu", "out_dir": None, "recording": None}
"""Parameter -> its value in the command that measures what was replayed or built."""

TargetArgument = Annotated[
    str | None,
    typer.Argument(
        help=f"{TARGET_HELP} path.py alone is a program: it is run, and all its kernels are tuned."
    ),
]
ProgramArgument = Annotated[
    list[str] | None, typer.Argument(help="Arguments of a program, after `--`.")
]
StrategyOption = Annotated[
    str | None,
    typer.Option(
        help="assembler (default for a kernel with PTX: random orders, registers and options that "
        "ptxas is given); anneal (default for a cubin), sip and random move native instructions; "
        "cuasmrl and ppo learn to, and need `pip install 'nostall[rl]'`."
    ),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(help="Policy file of `nostall train` to start with; the strategy is then ppo."),
]
ObjectiveOption = Annotated[
    str | None,
    typer.Option(
        help="gpu (measures every candidate); recorded (default for a kernel with PTX: replays "
        "measurements of an earlier search, and verifies its result); model (default for a cubin: "
        f"modelled times; the model {RANKING_WORTH})."
    ),
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
NativeOption = Annotated[
    str,
    typer.Option(
        help="Strategy that moves native instructions of the assembler's winner, in the last "
        "15 % of the time: anneal, sip, random, cuasmrl or ppo."
    ),
]
DependentLaunchOption = Annotated[
    str | None,
    typer.Option(
        "--pdl",
        help="After the search, try dependent launches and measure them back to back: wait (sink a "
        "wait for the kernels before to the first access of memory); trigger (also let the next "
        "kernel start early: only if every kernel that is launched as a dependent waits itself).",
    ),
]
RecordOption = Annotated[
    Path | None,
    typer.Option(
        help="Write the measured search to this file, which other machines replay; needs "
        "--objective gpu and the strategy assembler."
    ),
]
RecordingOption = Annotated[
    Path | None,
    typer.Option(
        help="Recording to replay; default: that of the kernel in the folder recordings beside "
        "its file."
    ),
]


def tune(
    target: TargetArgument = None,
    arguments: ProgramArgument = None,
    kernel: KernelOption = None,
    launch: LaunchOption = None,
    arch: ArchOption = None,
    strategy: StrategyOption = None,
    policy: PolicyOption = None,
    objective: ObjectiveOption = None,
    seed: SeedOption = 0,
    seconds: SecondsOption = None,
    evaluations: EvaluationsOption = None,
    out_dir: OutOption = None,
    resume: ResumeOption = None,
    store: StoreOption = None,
    workers: WorkersOption = None,
    scheduler: SchedulerOption = None,
    assemblers: AssemblersOption = False,
    ptxas_options: PtxasOptionsOption = "",
    checks: ChecksOption = 16,
    tolerance: ToleranceOption = None,
    timing: TimingOption = "graph",
    cold: ColdOption = False,
    sanitizer: SanitizerOption = False,
    measured_latencies: MeasuredLatenciesOption = False,
    native: NativeOption = Settings.native,
    pdl: DependentLaunchOption = None,
    record: RecordOption = None,
    recording: RecordingOption = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
    context: GivenContext = NO_CONTEXT,
) -> None:
    """Search for a faster version of a kernel, and verify it.

    The verifier checks the result; if it is unsafe or no faster, the original is kept. Ctrl-C ends
    the search and keeps the best candidate so far.

    A program (`app.py`) is run and its kernels are recorded; `--seconds` is then one budget, which
    is divided by their shares of the time and by the gains measured for their kinds.
    """
    check_limits(seconds, evaluations)
    is_program = target is not None and target.endswith(".py") and resume is None
    if is_program and objective is None:
        objective = "gpu"
    if arguments and not is_program:
        raise BadInput(
            f"{shlex.join(arguments)}: arguments are for a program, path.py; leave them out"
        )
    if recording is not None and objective is None:
        objective = "recorded"
    if resume is not None:
        refuse_all_but(
            context,
            _RESUME_OPTIONS,
            "cannot be given with --resume: the run goes on with its own kernel and settings; "
            "leave it out, or start a new run",
        )
        run = reopen_run(resume, seconds, evaluations, workers)
        check_settings(run.settings, scheduler)
        check_files(run.settings, record, recording)
        if run.settings.objective == "recorded":
            raise BadInput(
                f"{resume} is a run without a search of its own, so there is nothing to continue; "
                "start a new run"
            )
    else:
        if target is None:
            raise BadInput(
                "nothing to tune; give path.py:kernel, a .ptx or .cubin file, or --resume RUN"
            )
        if seconds is None and evaluations is None:
            seconds = DEFAULT_SECONDS
        choose = partial(
            complete_choice,
            strategy,
            objective,
            has_policy=policy is not None,
            is_distributed=scheduler is not None or (workers or 1) > 1,
        )
        chosen_strategy, chosen_objective = choose(has_ptx=strategy == ASSEMBLER or is_program)
        settings = Settings(
            chosen_strategy,
            seed=seed,
            seconds=seconds,
            evaluations=evaluations,
            objective=chosen_objective,
            workers=workers,
            checks=require_checks(checks),
            clock=parse_timing(timing),
            cold=cold,
            tolerance=parse_tolerance(tolerance),
            sanitizer=sanitizer,
            policy=policy,
            measured_latencies=measured_latencies,
            pdl=pdl or "",
            native=native,
            # A recorded winner is verified on machines without its ptxas, which is only possible
            # without moves of native instructions.
            anneal_share=0.0 if record is not None else Settings.anneal_share,
        )
        check_settings(settings, scheduler)
        if is_program:
            assert target is not None
            refuse_all_but(context, PROGRAM_OPTIONS, PROGRAM_REFUSAL)
            output = _Output(format, quiet)
            program = ProgramInput(
                (target, *(arguments or ())), arch, out_dir, format, quiet, store
            )
            tune_program(program, settings, partial(_tune_one, store=store, output=output))
            return

        def complete(source: Source) -> Settings:
            """The settings with the strategy and the objective for this source."""
            has_ptx = source.ptx is not None and not assemblers
            chosen_strategy, chosen_objective = choose(has_ptx=has_ptx)
            chosen = replace(settings, strategy=chosen_strategy, objective=chosen_objective)
            check_settings(chosen, scheduler, source)
            check_files(chosen, record, recording)
            return chosen

        kernel_input = KernelInput(target, kernel, launch, arch, assemblers, ptxas_options)
        run = start_run(kernel_input, complete, out_dir)
        if run.settings.objective == "recorded":
            from nostall.cli.tuning.recorded import tune_recorded

            measure = shlex.join(["nostall", "tune", target, "--objective", "gpu"])
            if context is not None:
                measure = repeated_command(context, _MEASURED)
            tune_recorded(run, recording, measure, format, quiet=quiet)
            return
    output = _Output(format, quiet, record, given_words(context, _RESUMED))
    _tune(run, scheduler, store, output, resume=resume is not None)


@dataclass(frozen=True)
class _Output:
    """Output options."""

    format: Format
    quiet: bool
    record: Path | None = None
    """Recording file to write."""
    resumed: tuple[str, ...] = ()
    """The given options that a command that continues the run repeats."""


def _tune(
    tune_run: TuneRun, scheduler: str | None, store: bool | None, output: _Output, *, resume: bool
) -> None:
    """Run the search, record a gain in the store, write the report and print the result.

    Raises :class:`BadStore` at the end if the store that ``store`` asks for cannot be used.
    """
    run, source, settings = tune_run.run, tune_run.source, tune_run.settings
    with discard_if_empty(run, is_new=not resume), measured_compile_time() as compilation:
        from nostall.report.tune.page import write_report
        from nostall.tuning.assembler.recipes.recording import record_run

        result, stored = _search(tune_run, scheduler, store, output, resume=resume)
    row = stored if isinstance(stored, Row) else None
    try:
        if output.record is not None:
            record_run(run, source).write(output.record)
        page = write_report(run.path)
    except KeyboardInterrupt as error:
        raise kept_after_interrupt(run) from error
    compilation.show()
    if settings.strategy == SIP and source.launch is not None and source.launch.flops is None:
        err.print(
            f"sip compares TFLOPS: without `flops` in the launch, the original counts as "
            f"{NOMINAL_TFLOPS:g} TFLOPS"
        )
    show_result(tune_run, result, page, row, output.format, output.resumed)
    if isinstance(stored, BadStore):
        raise stored


def _tune_one(
    source: Source, settings: Settings, folder: Path | None, store: bool | None, output: _Output
) -> tuple[TuningResult, Path]:
    """Search one kernel of a program; returns the result and the run directory."""
    from nostall.report.tune.page import write_report

    tune_run = create_run(source, settings, folder)
    with discard_if_empty(tune_run.run, is_new=True):
        result, stored = _search(tune_run, None, store, output, resume=False)
    write_report(tune_run.run.path)
    if isinstance(stored, BadStore):
        err.print(f"not recorded in the store: {stored}")
    return result, tune_run.run.path


def _search(
    tune_run: TuneRun, scheduler: str | None, store: bool | None, output: _Output, *, resume: bool
) -> tuple[TuningResult, Row | BadStore | None]:
    """Run the search and record a gain in the store; returns its row, or why there is none."""
    run, source, settings = tune_run.run, tune_run.source, tune_run.settings
    is_shown = output.format is Format.TABLE and not output.quiet
    bar = SearchProgress(settings.budget, enabled=is_shown)
    notice = "ending the search; the best schedule is verified now (Ctrl-C again leaves at once)"
    with run:
        if resume:
            limits = {"seconds": settings.seconds, "evaluations": settings.evaluations}
            run.restart({**run.record.settings, **limits, "workers": settings.workers})
        try:
            with (
                open_search(source, settings, scheduler, run.path / LOG_FOLDER) as (search, device),
                bar,
                Interruption(notice) as interruption,
            ):
                observers: list[Observer] = [bar, interruption]
                result = _run_search(tune_run, search, device, observers, resume=resume)
                info = device.info if device else None
                try:
                    return result, store_gain(source, settings, result, info, store)
                except BadStore as error:
                    return result, error
        except KeyboardInterrupt as error:
            raise kept_after_interrupt(run) from error


def _run_search(
    tune_run: TuneRun,
    search: Search,
    device: Device | None,
    observers: Sequence[Observer],
    *,
    resume: bool,
) -> TuningResult:
    """Run the job of the strategy."""
    run, source, settings = tune_run.run, tune_run.source, tune_run.settings
    if settings.strategy != ASSEMBLER or device is None:
        from nostall.tuning.job import tune as run_job

        return run_job(
            source,
            search,
            settings,
            run=run,
            observers=observers,
            resume=resume,
            device=device,
        )
    from nostall.tuning.assembler.job import open_setup, tune_assembler

    with open_setup(source, dependents_wait=settings.pdl == "trigger") as setup:
        return tune_assembler(
            setup,
            search,
            settings,
            device,
            run=run,
            observers=observers,
            resume=resume,
            open_device=LocalGpu,
        )
