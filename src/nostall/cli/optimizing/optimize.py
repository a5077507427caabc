"""The command ``nostall optimize``: prove what makes a whole program faster, and hand it over."""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli import INTERRUPTED
from nostall.cli.terminal.console import (
    Format,
    FormatOption,
    QuietOption,
    err,
    out,
    show_json,
    show_table,
)
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.optimizing.bundle import KERNELS_FILE, write_bundle
from nostall.optimizing.earlier import RESULT_FILE, read_earlier
from nostall.optimizing.job import Options
from nostall.optimizing.job import optimize as run_job
from nostall.optimizing.job import replay as replay_job
from nostall.optimizing.page import write_page
from nostall.optimizing.program import SCRATCH
from nostall.optimizing.recording import (
    RECORDING_FILE,
    Entry,
    read_recording,
    write_recording,
)
from nostall.optimizing.result import Result, interval

BUNDLE_FILE, PAGE_FILE = "bundle.json", "report.html"
TRACE_SUFFIXES = (".json", ".json.gz", ".sqlite")
NO_BOUND = "advice only: nothing was tried, and the gains of a trace are modelled, no bounds"

CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(
        help="The program and its arguments, after `--`; `{scratch}` in them is an empty folder. "
        "Or one trace, for advice."
    ),
]
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out", help="Folder for bundle, report and result.", show_default="optimized, or --resume"
    ),
]
ReplayOption = Annotated[
    Path | None,
    typer.Option(help="Derive the result of a recorded run again; runs no program, needs no GPU."),
]
ResumeOption = Annotated[
    Path | None,
    typer.Option(help="Folder of a run that was stopped: what it tried is not tried again."),
]


def optimize(
    command: CommandArgument = None,
    minutes: Annotated[float, typer.Option(help="Time for all attempts.")] = 10.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Watch and show the bounds; try nothing.")
    ] = False,
    run_to_end: Annotated[
        bool, typer.Option("--run-to-end", help="Let the program run on after the attempts.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Start the program a second time to confirm.")
    ] = False,
    allow_numerics: Annotated[
        bool,
        typer.Option("--allow-numerics", help="Also try TF32 products, which change results."),
    ] = False,
    step: Annotated[
        str | None, typer.Option(help="Function that ends a step: module:function.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of blocks.")] = 0,
    resume: ResumeOption = None,
    replay: ReplayOption = None,
    out_folder: OutOption = None,
    quiet: QuietOption = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Prove what makes a whole program faster.

    The unchanged program runs until enough of its steps were seen. Changes of its configuration
    are then switched on and off between steps: `torch.compile`, CUDA graphs and the back end
    nostall on GPUs, `channels_last`, a captured, fused or foreach optimiser, a compiled loss, and
    native binaries of the program's own Triton kernels, which are searched while it waits. A change
    is kept if its results are proven on copies and the whole program's step is faster beyond the
    noise. The program is ended at an agreed step.
    """
    if replay is not None:
        _replay(replay, command, out_folder, quiet=quiet, format=format)
        return
    if not command:
        raise BadInput("there is no program; write `nostall optimize -- python train.py`")
    if len(command) == 1 and command[0].endswith(TRACE_SUFFIXES):
        _advise(Path(command[0]), format)
        return
    options = _options(
        minutes=minutes, dry_run=dry_run, run_to_end=run_to_end, again=again,
        allow_numerics=allow_numerics, step=step, seed=seed, quiet_output=format is Format.JSON,
    )  # fmt: skip
    _run(command, options, resume, out_folder, quiet=quiet)


def _run(
    command: list[str],
    options: Options,
    resume: Path | None,
    out_folder: Path | None,
    *,
    quiet: bool,
) -> None:
    """Run the job, and show and write its result; exits as the program did."""
    say = (lambda line: None) if quiet else (lambda line: err.print(f"nostall: {line}"))
    folder = out_folder or resume or Path("optimized")
    _refuse_unwritable(folder)
    earlier = read_earlier(resume, command, options.step) if resume else None
    starts: list[list[Entry]] = []
    result = run_job(
        command, options, say, save=lambda r: _save(r, folder), earlier=earlier, starts=starts,
        own=folder,
    )  # fmt: skip
    written = _write(result, folder)
    if written and earlier is None:  # what an earlier run asked is not in it
        written.append(write_recording(starts, options, result, folder))
    elif written:
        (folder / RECORDING_FILE).unlink(missing_ok=True)  # it is of another result
    if options.quiet_output:
        show_json({**result.as_json(), "files": [str(path) for path in written]})
    else:
        _show_result(result)
        _show_next(command, written)
    if result.interrupted and not result.kept:
        raise typer.Exit(INTERRUPTED)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _refuse_unwritable(folder: Path) -> None:
    """Refuse a folder of results before the program runs for minutes; creates nothing.

    The first folder above that exists is tried with a file: access rights do not tell of file
    systems that are read-only.
    """
    existing = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise BadInput(
            f"results cannot be written to {folder}: {error.strerror or error} ({existing}); "
            "give a folder that can be written with --out FOLDER"
        ) from error


def _replay(
    path: Path, command: list[str] | None, out_folder: Path | None, *, quiet: bool, format: Format
) -> None:
    """Derive the result of a recorded run again, and show and write it."""
    if command:
        raise BadInput(f"--replay: a recording has its program; leave {command[0]!r} out")
    say = (lambda line: None) if quiet else (lambda line: err.print(f"nostall: replay: {line}"))
    result = replay_job(read_recording(path), say)
    written = _write(result, out_folder or Path("replayed"))
    if format is Format.JSON:
        show_json({**result.as_json(), "files": [str(file) for file in written]})
    else:
        _show_result(result)
        _show_next(result.command, written, replayed=True)


def _advise(trace: Path, format: Format) -> None:
    """Show where the time of a trace goes and what to fix first; nothing is tried."""
    from nostall.cli.characterizing.traces import show_traces
    from nostall.workload.characterization import characterize_traces
    from nostall.workload.traces.ranks import read_ranks

    result = characterize_traces(read_ranks([trace]))
    if format is Format.JSON:
        show_json({**result.as_json(), "note": NO_BOUND})
    else:
        show_traces(result)
        out.print(f"note: {NO_BOUND}")


def _options(*, minutes: float, step: str | None, **others: bool | int) -> Options:
    """The options; raises :class:`BadInput` for values that cannot be used."""
    if not (math.isfinite(minutes) and minutes > 0):
        raise BadInput(f"--minutes is {minutes:g}; give minutes above 0, such as 10")
    module, _, function = (step or "a:b").partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *function.split(".")]):
        raise BadInput(f"--step is {step!r}; give module:function, such as trainer.loop:train_step")
    return Options(minutes=minutes, step=step, **others)  # type: ignore[arg-type]


def _save(result: Result, folder: Path) -> None:
    """Write what is known, so that a run that is killed can be resumed."""
    text = json.dumps(result.as_json(), indent=1)
    write_text_atomically(folder / RESULT_FILE, text + "\n", parents=True)


def _write(result: Result, folder: Path) -> list[Path]:
    """Write the result, its page and, if anything is kept, the bundle; the paths."""
    if result.facts is None:
        return []
    _save(result, folder)
    paths = [folder / RESULT_FILE, write_page(result, folder / PAGE_FILE)]
    if result.kept and result.together and (bundle := _bundle(result, folder)):
        paths.append(bundle)
    else:
        for name in (BUNDLE_FILE, KERNELS_FILE):  # of an earlier run, and not proven here
            (folder / name).unlink(missing_ok=True)
    return paths


def _bundle(result: Result, folder: Path) -> Path | None:
    """Write the bundle; None, with the reason on standard error, without its records."""
    try:
        return write_bundle(result, folder / BUNDLE_FILE)
    except BadInput as error:  # of the store
        err.print(f"nostall: no bundle is written: {error}")
        return None


def _show_result(result: Result) -> None:
    """Print the levels, the attempts, what is kept and notes."""
    if result.facts is not None:
        show_table(
            f"what each level can gain at most; measured on {result.facts.raw['device']}",
            ("level", "share", "at most", "why"),
            [
                (
                    level.name,
                    "-" if level.share is None else f"{level.share:.0%}",
                    "no bound" if level.bound is None else f"{level.bound:.2f}x",
                    level.reason,
                )
                for level in result.levels
            ],
        )
    if result.attempts:
        show_table(
            "tried on the program's own steps",
            ("change", "outcome", "results", "why"),
            [(a.level.name, a.outcome, a.result_class, a.reason) for a in result.attempts],
        )
    if result.certificate:
        out.print(f"certificate of no gain: {result.certificate}")
    for note in result.notes:
        out.print(f"note: {note}")
    if result.facts is not None and not result.certificate:
        _show_kept(result)


def _show_kept(result: Result) -> None:
    together = result.together
    if not result.kept:
        if result.attempts:
            out.print("nothing is kept: no change was proven to make the step faster")
        return
    assert together is not None and together.comparison is not None
    before = 1e3 * together.seconds[0]
    after = before / together.comparison.ratio  # of pairs of blocks, as the page shows it
    out.print(
        f"step: {before:.4g} ms -> {after:.4g} ms, {interval(together.comparison)} times as fast, "
        f"null [{together.comparison.null_low:.3f}, {together.comparison.null_high:.3f}]"
    )
    if result.again is not None and result.again.comparison is not None:
        out.print(f"second start: {interval(result.again.comparison)} times as fast")
    out.print("what a person would write:")
    for attempt in result.kept:
        out.print(f"  {attempt.level.line}  ({attempt.result_class})")


def _show_next(command: list[str], written: list[Path], replayed: bool = False) -> None:
    for path in written:
        if path.name == PAGE_FILE:
            err.print(f"report:   {path}")
        elif path.name == BUNDLE_FILE:
            # A replay proved nothing of this machine, and its program may not be here.
            bundle = ["optimize"] if replayed else ["apply", "--bundle", str(path)]
            words = [word.replace(SCRATCH, "FOLDER") for word in command]
            err.print(f"next:     {shlex.join(['nostall', *bundle, '--', *words])}")
