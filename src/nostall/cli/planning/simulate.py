"""The command ``nostall simulate``: simulate a plan file, optionally in another order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from nostall.cli.planning.output import GanttOption, write_and_show
from nostall.cli.terminal.console import Format, FormatOption
from nostall.core.text.suggest import unknown
from nostall.parallel.errors import BadPlan
from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import POLICIES, Policy
from nostall.parallel.plan_file import load_plan, load_planned_module
from nostall.parallel.torchtitan_export import export_stages, export_torchtitan


def simulate(
    plan: Annotated[Path, typer.Argument(help="Plan file of `nostall plan --out`.")],
    policy: Annotated[
        str | None, typer.Option(help=f"Order to use instead: one of {', '.join(POLICIES)}.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write a new plan file.")] = None,
    gantt: GanttOption = None,
    torchtitan: Annotated[
        Path | None,
        typer.Option(help="Write schedule.csv and settings for torchtitan to this folder."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            help="Write Python text that builds PyTorch's pipeline stages and their schedule."
        ),
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Simulate a pipeline plan, optionally in another order.

    The order is that of the micro-batches. Times of a plan are modelled.
    """
    workload, loaded, planner = load_plan(plan)
    if policy is not None:
        if policy not in get_args(Policy):
            raise BadPlan(unknown("policy", policy, POLICIES))
        loaded = replace(loaded, policy=cast(Policy, policy), in_flight=None)
    if torchtitan is not None:
        export_torchtitan(workload, loaded, torchtitan)
    if export is not None:
        export_stages(workload, loaded, export)
    evaluation = evaluate_plan(workload, loaded, planner)
    write_and_show(evaluation, out_file, gantt, format, load_planned_module(plan))
