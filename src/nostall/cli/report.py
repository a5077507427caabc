"""``nostall report RUN``: one HTML page of a tuning run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.console import out
from nostall.report import write_report


def report(
    run: Annotated[Path, typer.Argument(help="A run directory made by `nostall tune`.")],
) -> None:
    """Write RUN/report.html: before and after, what waits for what, the search's course."""
    out.print(f"report: {write_report(run)}")
