"""The command ``nostall fuse``: fuse the operators of a PyTorch function into kernels."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nostall.cli.options.given_options import NO_CONTEXT, GivenContext, refuse_options
from nostall.cli.options.inputs import DEFAULT_ARCH
from nostall.cli.terminal.console import Format, FormatOption, QuietOption, out, show_json
from nostall.cli.terminal.progress import Interruption, stage_bar
from nostall.core.errors import BadInput, Interrupted, MissingPart
from nostall.core.run import Run
from nostall.core.text.suggest import unknown
from nostall.tuning.fusing.inputs import CASTS, parse_target, torch_dtype
from nostall.tuning.sources.source import compute_capability

if TYPE_CHECKING:
    from nostall.tuning.fusing.document import Document
    from nostall.tuning.fusing.job import FusionSettings
    from nostall.tuning.fusing.target import FusionRequest, TracedTarget

DEFAULT_EVALUATIONS = 300
"""Evaluations per kernel of ``--tune-sass``."""
_MAX_NAME_LENGTH = 40

TargetArgument = Annotated[
    str,
    typer.Argument(
        help="path.py:name of a function of tensors, a module, or a function that makes one."
    ),
]
InputsOption = Annotated[
    str | None,
    typer.Option(
        help="Shapes and types, such as `4096x5000:f16,5000:f16,=0.1`, or a function of the file; "
        "default: its function inputs."
    ),
]
BackwardOption = Annotated[
    bool, typer.Option("--backward", help="Fuse the forward and the backward pass of training.")
]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help=f"Convert floating-point inputs and parameters to one of {', '.join(CASTS)}."
    ),
]
ArchOption = Annotated[str, typer.Option(help="Architecture to compile the kernels for.")]
StrategyOption = Annotated[
    str,
    typer.Option(
        help="explore, refined, greedy, or optimum (needs `pip install 'nostall[fusion]'`)."
    ),
]
ShowOption = Annotated[bool, typer.Option("--show", help="Print the Triton source.")]
ExplainOption = Annotated[
    bool,
    typer.Option(
        "--explain", help="Print which calls are not fused and why, and the schedules considered."
    ),
]
MeasureOption = Annotated[
    bool, typer.Option("--measure", help="Time each kernel alone on the GPU of this machine.")
]
TuneSassOption = Annotated[
    bool,
    typer.Option(
        "--tune-sass", help="Search the instruction schedule of each kernel, too, on the SM model."
    ),
]
EvaluationsOption = Annotated[
    int, typer.Option(min=1, help="Evaluations per kernel of `--tune-sass`.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Random seed of `--tune-sass`.")]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="Run directory to create; default: a new one in runs/."),
]


@dataclass(frozen=True)
class _Output:
    """Output options."""

    format: Format
    quiet: bool
    show: bool
    explain: bool


@dataclass(frozen=True)
class _Fusion:
    """The request, the settings and the traced function."""

    request: FusionRequest
    settings: FusionSettings
    traced: TracedTarget


def fuse(
    target: TargetArgument,
    inputs: InputsOption = None,
    backward: BackwardOption = False,
    dtype: DtypeOption = None,
    arch: ArchOption = DEFAULT_ARCH,
    strategy: StrategyOption = "explore",
    show: ShowOption = False,
    explain: ExplainOption = False,
    measure: MeasureOption = False,
    tune_sass: TuneSassOption = False,
    evaluations: EvaluationsOption = DEFAULT_EVALUATIONS,
    seed: SeedOption = 0,
    out_dir: OutOption = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
    context: GivenContext = NO_CONTEXT,
) -> None:
    """Fuse the operators of a PyTorch function into kernels.

    The function is traced, its memory-intensive operators are fused, and the kernels are compiled.
    Nothing is executed, except with `--measure`, and no GPU is needed: times are modelled unless
    marked as measured. Ctrl-C keeps the results so far.
    """
    if dtype is not None and dtype not in CASTS:
        raise BadInput(unknown("--dtype", dtype, CASTS))
    compute_capability(arch)
    if not tune_sass:
        reason = "is an option of the search over instructions; give --tune-sass as well"
        refuse_options(context, ("evaluations", "seed"), reason)
    fusion = _trace(target, inputs, dtype, backward, strategy, arch)
    if measure:
        fusion = replace(fusion, settings=_with_measuring(fusion.settings))
    output = _Output(format, quiet, show, explain)
    notice = "ending the job; its results so far are written now (Ctrl-C again leaves at once)"
    with Interruption(notice) as interruption:
        if tune_sass:
            settings = _with_tuning(fusion.settings, evaluations, seed, interruption)
            fusion = replace(fusion, settings=settings)
        command = shlex.join(["nostall", *sys.argv[1:]])
        path = out_dir or _new_run_folder(fusion.traced.name)
        run = Run.create(path, command, fusion.settings.described(fusion.request))
        is_shown = not quiet and format is Format.TABLE
        try:
            document = _run_with_progress(fusion, run, interruption, is_shown=is_shown)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted before the results were complete; {path} keeps the kernels that were "
                "written; there is nothing to resume, so run the command again"
            ) from error
    _show_result(document, run, _write_pages(document, run), output)


def _trace(
    target: str, inputs: str | None, dtype: str | None, backward: bool, strategy: str, arch: str
) -> _Fusion:
    """Trace the target.  PyTorch is imported only here, after the cheap checks."""
    parse_target(target)
    _require("torch", "nostall fuse traces PyTorch functions")
    _require("triton", "fused kernels are Triton kernels")
    from nostall.tuning.fusing.job import FusionSettings
    from nostall.tuning.fusing.target import FusionRequest, trace_target

    settings = FusionSettings(strategy=strategy, arch=arch)
    request = FusionRequest(target, inputs, torch_dtype(dtype) if dtype else None, backward)
    return _Fusion(request, settings, trace_target(request))


def _require(package: str, reason: str) -> None:
    """Raise :class:`MissingPart` if a package cannot be imported."""
    try:
        import_module(package)
    except ImportError as error:
        raise MissingPart(
            f"{package} cannot be imported ({error}); {reason}: pip install 'nostall[{package}]'"
        ) from error


def _with_measuring(settings: FusionSettings) -> FusionSettings:
    from nostall.tuning.fusing import job

    job.check_gpu()
    return replace(settings, measure=job.measure_on_this_gpu)


def _with_tuning(
    settings: FusionSettings, evaluations: int, seed: int, interruption: Interruption
) -> FusionSettings:
    from nostall.tuning.settings import Settings

    tuning = Settings(evaluations=evaluations, seed=seed)
    return replace(settings, tuning=tuning, observers=(interruption,))


def _run_with_progress(
    fusion: _Fusion, run: Run, interruption: Interruption, *, is_shown: bool
) -> Document:
    from nostall.tuning.fusing.job import run_fuse

    bar = stage_bar(enabled=is_shown)
    task = bar.add_task("planning", total=1.0)

    def progress(share: float, stage: str) -> None:
        bar.update(task, completed=share, description=stage)
        if interruption.requested:  # the exception of Ctrl-C was lost in a callback
            raise KeyboardInterrupt

    with run, bar:
        return run_fuse(fusion.request, fusion.traced, fusion.settings, run, progress)


def _write_pages(document: Document, run: Run) -> Path:
    """Write the report, and one for each tuned kernel; returns the path of the former."""
    from nostall.report.fusion.page import write_page
    from nostall.report.tune.page import write_report

    for tuned in document.tuned:
        if tuned.folder and not tuned.note:
            write_report(run.path / tuned.folder)
    return write_page(run.path)


def _show_result(document: Document, run: Run, page: Path, output: _Output) -> None:
    if output.format is Format.JSON:
        fields = {"run": str(run.path), "result": run.record.result}
        show_json({**fields, **document.model_dump(mode="json")})
        return
    from nostall.cli.fusing.tables import show_document, show_explanation

    if output.show:
        _print_sources(document, run)
    show_document(document)
    if output.explain:
        show_explanation(document)
    out.print(f"report:   {page}")
    out.print(f"next:     {_next_command(document, run)}")


def _print_sources(document: Document, run: Run) -> None:
    kernels = [kernel for traced_pass in document.passes for kernel in traced_pass.kernels]
    for source in dict.fromkeys(kernel.source for kernel in kernels):
        out.print(f"# {run.path / source}")
        path = run.path / source
        out.print(path.read_text() if path.exists() else "# not written: interrupted")


def _next_command(document: Document, run: Run) -> str:
    """The command to run next: verify a tuned kernel, tune a kernel, or show the report."""
    for tuned in document.tuned:
        if tuned.improved:
            folder = run.path / tuned.folder
            files: Sequence[Path] = [folder / "original.cubin", folder / "best.cubin"]
            return shlex.join(["nostall", "verify", *map(str, files)])
    from nostall.report.fusion.page import tune_command

    command = tune_command(document, run.path)
    return command or shlex.join(["nostall", "report", str(run.path)])


def _new_run_folder(name: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return Path("runs") / f"{stamp}-fuse-{name[:_MAX_NAME_LENGTH]}"
