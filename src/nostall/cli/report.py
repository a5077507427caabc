"""``nostall report RUN``: one HTML page of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.console import out
from nostall.report import write_report
from nostall.report.fusion import is_fusion, write_page


def report(
    run: Annotated[
        Path, typer.Argument(help="A run directory made by `nostall tune` or `nostall fuse`.")
    ],
) -> None:
    """Write RUN/report.html: before and after, what waits for what, the search's course."""
    page = write_page(run) if is_fusion(run) else write_report(run)
    out.print(f"report: {page}")
