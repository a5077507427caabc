"""Output of ``nostall plan`` and ``nostall simulate``: plan file, Gantt chart, table or JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nostall.cli.terminal.console import Format, out, show_json, show_table
from nostall.core.errors import NostallError
from nostall.core.files.atomic import write_text_atomically
from nostall.parallel.evaluation import PlanEvaluation, evaluate_plan
from nostall.parallel.plan_file import plan_document
from nostall.parallel.planners import make_plan
from nostall.parallel.planners.own_plan import Change
from nostall.report.plan.gantt import write_gantt
from nostall.report.plan.summary import sentences, stage_table
from nostall.report.units import Scale

DATA_PARALLEL = "data-parallel"
"""The planner that each plan is compared with."""

GanttOption = Annotated[
    Path | None, typer.Option(help="Write the schedule as a Gantt chart (.svg or .html).")
]


def write_and_show(
    evaluation: PlanEvaluation,
    out_file: Path | None,
    gantt: Path | None,
    format: Format,
    module: str | None,
    changes: Sequence[Change] | None = None,
) -> None:
    """Write the requested files, then print the evaluation.

    ``module`` is the ``path.py:build`` that was profiled, None for a profile file.  ``changes`` are
    those of a plan of the user's own.
    """
    beside = _data_parallelism(evaluation)
    if gantt is not None:
        write_gantt(evaluation, gantt, beside, _launch(out_file, module))
    document = plan_document(evaluation, module)
    if changes is not None:
        document["changes"] = [asdict(change) for change in changes]
    if out_file is not None:
        write_text_atomically(out_file, json.dumps(document, indent=1) + "\n", parents=True)
    if format is Format.JSON:
        show_json(document)
        return
    columns, rows = stage_table(evaluation)
    workload = evaluation.workload
    title = f"{workload.profile.name} on {workload.cluster.name}"
    show_table(title, columns, rows, optional=("in flight",))
    for line in sentences(evaluation, beside):
        out.print(line)
    for line in _change_lines(changes):
        out.print(line)
    for path, name in ((gantt, "schedule"), (out_file, "plan")):
        if path is not None:
            out.print(f"{name + ':':10}{path}")


def _launch(plan: Path | None, module: str | None) -> str:
    """The command that runs a plan; empty without its file."""
    if plan is None:
        return ""
    words = ["nostall", "launch", str(plan)]
    return shlex.join(words if module else [*words, "--module", "path.py:build"])


def _change_lines(changes: Sequence[Change] | None) -> list[str]:
    if changes is None:
        return []
    if not changes:
        return ["no single change is faster under this model; --planner nostall searches for more"]
    return [
        "changes worth most, modelled:",
        *(
            f"{number}. {change.text}: {change.speedup:.2f}x as fast, "
            f"{Scale('s', change.iteration_s)(change.iteration_s)} an iteration"
            for number, change in enumerate(changes, 1)
        ),
    ]


def _data_parallelism(evaluation: PlanEvaluation) -> PlanEvaluation | None:
    """Data parallelism of the same workload; None for itself, and if it has no plan."""
    if evaluation.planner == DATA_PARALLEL:
        return None
    try:
        plan = make_plan(evaluation.workload, DATA_PARALLEL)
        return evaluate_plan(evaluation.workload, plan, DATA_PARALLEL)
    except NostallError:
        return None
