"""The commands ``nostall runs``: list, show and compare run directories."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from nostall.cli.options.help_panels import command_group
from nostall.cli.terminal.console import Format, FormatOption, out, show_json, show_table
from nostall.cli.tuning.runs import RUNS_FOLDER, resume_command
from nostall.core.errors import BadRun
from nostall.report.units import Scale
from nostall.tuning.records.run_summary import (
    STOPPED,
    RunSummary,
    differences,
    find_runs,
    rank,
    summarize,
)

app = command_group(needs_command=False)

FolderArgument = Annotated[Path, typer.Argument(help="Folder of the runs.")]
RunArgument = Annotated[Path, typer.Argument(help="Run directory.")]
RunsArgument = Annotated[list[Path], typer.Argument(help="Run directories, two or more.")]


@app.callback(invoke_without_command=True)
def default(context: typer.Context) -> None:
    """List, show and compare the runs of tune and fuse; without a command: list those in runs/."""
    if context.invoked_subcommand is None:
        list_runs()


@app.command("ls")
def list_runs(folder: FolderArgument = RUNS_FOLDER, format: FormatOption = Format.TABLE) -> None:
    """List the runs of a folder, oldest first: what, when, gain and state."""
    runs = find_runs(folder) if folder != RUNS_FOLDER or folder.exists() else []
    if format is Format.JSON:
        show_json([_document(run) for run in runs])
        return
    if not runs:
        out.print(f"no runs in {folder}; `nostall tune` and `nostall fuse` make them")
        return
    show_table(
        f"{len(runs)} runs in {folder}",
        ("run", "what", "when", "gain", "state"),
        [
            (
                run.path.name or str(run.path),
                _subject(run),
                (run.created or "-").replace("T", " ")[:16],
                _gain(run),
                run.state,
            )
            for run in runs
        ],
        optional=("when", "state"),
    )


@app.command("show")
def show(run: RunArgument, format: FormatOption = Format.TABLE) -> None:
    """Show the settings and the result of a run, and how to go on with it."""
    summary = _readable(run)
    if format is Format.JSON:
        show_json(_document(summary))
        return
    settings = {
        key: value
        for key, value in summary.settings.items()
        if value not in (None, "", [], {}) and not isinstance(value, dict)
    }
    rows = [
        ("state", summary.state),
        ("created", summary.created),
        ("command", summary.command),
        ("gain", _gain(summary)),
        ("times", _times(summary)),
        ("evaluations", summary.evaluations),
        *settings.items(),
    ]
    shown = {key: value for key, value in rows if value is not None}
    show_table(str(run), ("field", "value"), list(shown.items()))
    if summary.state in (STOPPED, "interrupted") and summary.original_sha256:
        out.print(f"go on:    {resume_command(run)}")


@app.command("compare")
def compare(runs: RunsArgument, format: FormatOption = Format.TABLE) -> None:
    """Compare runs: their settings, gains and times; measured gains first, the largest first."""
    if len(runs) < 2:
        raise BadRun(f"{len(runs)} run to compare; give two or more run directories")
    summaries = sorted(map(_readable, runs), key=rank)
    remarks = differences(summaries)
    if format is Format.JSON:
        show_json({"runs": [_document(run) for run in summaries], "remarks": remarks})
        return
    show_table(
        f"{len(summaries)} runs",
        ("run", "what", "strategy", "seed", "evaluations", "gain", "times", "state"),
        [
            (
                str(run.path),
                _subject(run),
                run.strategy or "-",
                "-" if run.seed is None else run.seed,
                "-" if run.evaluations is None else run.evaluations,
                _gain(run),
                _times(run) or "-",
                run.state,
            )
            for run in summaries
        ],
        optional=("seed", "state", "evaluations", "times", "strategy"),
    )
    for remark in remarks:
        out.print(f"note: {remark}")


def _subject(run: RunSummary) -> str:
    """The kernel or the function, without the folders of its file."""
    return (run.subject or "-").rpartition("/")[2]


def _readable(path: Path) -> RunSummary:
    """The summary of a run; raises :class:`BadRun` if it cannot be read."""
    summary = summarize(path)
    if summary.remark:
        raise BadRun(summary.remark)
    return summary


def _gain(run: RunSummary) -> str:
    if run.improved is False:
        return "none found"
    if run.ratio is None:
        return "-"
    # Without an interval further digits would say more than is known.
    gain = f"{run.ratio:.2f}x"
    if run.interval is not None:
        gain = f"{run.ratio:.4f}x [{run.interval[0]:.4f}, {run.interval[1]:.4f}]"
    over = "" if run.baseline == "the original" else f" over {run.baseline}"
    return f"{run.kind or ''} {gain}{over}".strip()


def _times(run: RunSummary) -> str | None:
    """Times before and after, such as ``4.12 us -> 3.47 us``."""
    if run.before is None or run.after is None:
        return None
    scale = Scale("s", run.after)
    return f"{scale(run.before)} -> {scale(run.after)}"


def _document(run: RunSummary) -> dict[str, Any]:
    values = {**asdict(run), "path": str(run.path), "ratio": run.ratio}
    return {key: dict(v) if key == "settings" else v for key, v in values.items()}
