"""The commands ``nostall serving``: batches, task tables and the simulation of a trace."""

from __future__ import annotations

import typer

from nostall.cli.serving.batches import write_batch
from nostall.cli.serving.gemm import tune
from nostall.cli.serving.native import native
from nostall.cli.serving.rollouts import rollouts
from nostall.cli.serving.search import search
from nostall.cli.serving.simulation import simulate_trace
from nostall.cli.serving.tables import show

app = typer.Typer(
    help="Show task tables; measure rollouts; simulate traces.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("show")(show)
app.command("batch")(write_batch)
app.command("tune")(tune)
app.command("search")(search)
app.command("native")(native)
app.command("rollouts")(rollouts)
app.command("simulate")(simulate_trace)
