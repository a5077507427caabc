"""The command ``nostall report``: write the HTML report of a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.terminal.console import out
from nostall.core import Run
from nostall.core.errors import BadRun

RunArgument = Annotated[
    Path, typer.Argument(help="Run directory of `nostall tune` or `nostall fuse`.")
]


def report(run: RunArgument) -> None:
    """Write the HTML report of a run directory.

    The file is RUN/report.html; it needs no network. For `nostall tune` it shows the course of the
    search, the stalls, and both schedules side by side; for `nostall fuse` the fused kernels.
    """
    from nostall.attach.rollouts.job import RESULT_FILE
    from nostall.report.fusion.page import is_fusion, write_page
    from nostall.report.tune.page import write_report

    if (run / RESULT_FILE).exists():
        raise BadRun(
            f"{run} is a run of `nostall serving rollouts`, which has no page; its figures and "
            f"samples are in {run / RESULT_FILE}; give a run of `nostall tune` or `nostall fuse`"
        )
    if (run / "report.html").exists() and not (run / "run.json").exists():
        raise BadRun(
            f"{run} is no run of `nostall tune` or `nostall fuse`; its page is already written: "
            f"{run / 'report.html'}"
        )
    page = write_page(run) if is_fusion(run) else write_report(run)
    for remark in Run.open(run).trial_log().remarks:
        out.print(f"note:   {remark}")
    out.print(f"report: {page}")
