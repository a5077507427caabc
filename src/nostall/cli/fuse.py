"""``nostall fuse``: which operators of a PyTorch function become one kernel, and those kernels."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nostall.cli.console import Format, FormatOption, QuietOption, err, out, show_json
from nostall.cli.inputs import DEFAULT_ARCH
from nostall.cli.interruption import Interruption
from nostall.core.errors import BadInput, MissingPart
from nostall.core.run import Run
from nostall.tuning.fusing.inputs import CASTS, parse_target, torch_dtype
from nostall.tuning.source import capability_of

if TYPE_CHECKING:
    from nostall.tuning.fusing.document import Document
    from nostall.tuning.fusing.job import FusionSettings
    from nostall.tuning.fusing.target import FusionRequest, TracedTarget

EVALUATIONS = 300
"""Of each kernel's search under ``--tune-sass``."""


def fuse(
    target: Annotated[
        str, typer.Argument(help="path.py:name, a function of tensors, a module, or its maker.")
    ],
    inputs: Annotated[
        str | None,
        typer.Option(
            help="4096x5000:f16,5000:f16,=0.1, or a function of the file; else its inputs()."
        ),
    ] = None,
    backward: Annotated[
        bool, typer.Option("--backward", help="The forward and the backward pass of training.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help=f"Floating inputs and parameters as one of {', '.join(CASTS)}."),
    ] = None,
    arch: Annotated[
        str, typer.Option(help="Architecture to compile the kernels for.")
    ] = DEFAULT_ARCH,
    strategy: Annotated[
        str, typer.Option(help="explore (usual), refined, greedy, or optimum (extra fusion).")
    ] = "explore",
    show: Annotated[bool, typer.Option("--show", help="Print the Triton source.")] = False,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Print what stayed outside, which schedules, and why."),
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time each kernel on the GPU here, one by one.")
    ] = False,
    tune_sass: Annotated[
        bool,
        typer.Option("--tune-sass", help="Search each kernel's instructions too, on the model."),
    ] = False,
    evaluations: Annotated[
        int, typer.Option(min=1, help="Evaluations for each kernel under --tune-sass.")
    ] = EVALUATIONS,
    seed: Annotated[int, typer.Option(min=0, help="Seed of --tune-sass.")] = 0,
    out_dir: Annotated[Path | None, typer.Option("--out", help="Run directory to make.")] = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Trace a PyTorch function, fuse its memory-intensive operators, and compile the kernels.

    Nothing is computed and no GPU is needed: times are modelled, but for those that --measure asks
    a GPU for.  Ctrl-C keeps what was found.
    """
    if dtype is not None and dtype not in CASTS:
        raise BadInput(f"--dtype is {dtype!r}; allowed are {', '.join(CASTS)}")
    capability_of(arch)
    asked, how, found = _traced(target, inputs, dtype, backward, strategy, arch)
    if measure:
        how = _with_measuring(how)
    with Interruption() as interruption:
        if tune_sass:
            how = _with_tuning(how, evaluations, seed, interruption)
        line = shlex.join(["nostall", *sys.argv[1:]])
        run = Run.create(out_dir or _fresh(found.name), line, how.described(asked))
        shown = not quiet and format is Format.TABLE
        document = _fused(asked, found, how, run, interruption, shown=shown)
    page = _pages(document, run)
    if format is Format.JSON:
        told = {"run": str(run.path), "result": run.record.result}
        show_json({**told, **document.model_dump(mode="json")})
        return
    from nostall.cli.fuse_tables import show_document, show_explanation

    if show:
        _print_sources(document, run)
    show_document(document)
    if explain:
        show_explanation(document)
    out.print(f"report:   {page}")
    out.print(f"next:     {_next(document, run)}")


def _traced(
    target: str, inputs: str | None, dtype: str | None, backward: bool, strategy: str, arch: str
) -> tuple[FusionRequest, FusionSettings, TracedTarget]:
    """What was asked, how to go about it, and the program; PyTorch is imported here at last."""
    parse_target(target)
    _need("torch", "fusion traces PyTorch programs")
    _need("triton", "fused kernels are written in it")
    from nostall.tuning.fusing.job import FusionSettings
    from nostall.tuning.fusing.target import FusionRequest, trace_target

    how = FusionSettings(strategy=strategy, arch=arch)
    asked = FusionRequest(target, inputs, torch_dtype(dtype) if dtype else None, backward)
    return asked, how, trace_target(asked)


def _need(package: str, why: str) -> None:
    try:
        import_module(package)
    except ImportError as error:
        raise MissingPart(
            f"{package} cannot be imported ({error}); {why}: pip install 'nostall[{package}]'"
        ) from error


def _with_measuring(how: FusionSettings) -> FusionSettings:
    from dataclasses import replace

    from nostall.tuning.fusing import timing

    timing.check_gpu()
    return replace(how, measure=timing.measure_on_this_gpu)


def _with_tuning(
    how: FusionSettings, evaluations: int, seed: int, interruption: Interruption
) -> FusionSettings:
    from dataclasses import replace

    from nostall.tuning.job import Settings

    tuning = Settings(evaluations=evaluations, seed=seed)
    return replace(how, tuning=tuning, observers=(interruption,))


def _fused(
    asked: FusionRequest,
    found: TracedTarget,
    how: FusionSettings,
    run: Run,
    interruption: Interruption,
    *,
    shown: bool,
) -> Document:
    from nostall.tuning.fusing.job import run_fuse

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        disable=not (shown and err.is_terminal),
        transient=True,
    )
    task = bar.add_task("planning", total=1.0)

    def progress(part: float, what: str) -> None:
        bar.update(task, completed=part, description=what)
        if interruption.asked:  # and lost on its way
            raise KeyboardInterrupt

    with run, bar:
        return run_fuse(asked, found, how, run, progress)


def _pages(document: Document, run: Run) -> Path:
    """The report, and one for each tuned kernel."""
    from nostall.report import write_report
    from nostall.report.fusion import write_page

    for each in document.tuned:
        if each.folder and not each.note:
            write_report(run.path / each.folder)
    return write_page(run.path)


def _print_sources(document: Document, run: Run) -> None:
    for source in dict.fromkeys(k.source for found in document.passes for k in found.kernels):
        out.print(f"# {run.path / source}")
        # Interrupted before it was compiled, a kernel has no file.
        path = run.path / source
        out.print(path.read_text() if path.exists() else "# not written: interrupted")


def _next(document: Document, run: Run) -> str:
    """A line to paste."""
    for each in document.tuned:
        if each.improved:
            files: Sequence[Path] = [
                run.path / each.folder / name for name in ("original.cubin", "best.cubin")
            ]
            return shlex.join(["nostall", "verify", *map(str, files)])
    sources = {
        name: k.source for found in document.passes for k in found.kernels for name in k.launches
    }
    for binary in document.binaries:
        if binary.file and not binary.findings:
            kernel = f"{run.path / sources[binary.name]}:{binary.name}"
            return shlex.join(["nostall", "tune", kernel, "--arch", document.arch])
    return shlex.join(["nostall", "report", str(run.path)])


def _fresh(name: str) -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")
    return Path("runs") / f"{stamp}-fuse-{name[:40]}"
