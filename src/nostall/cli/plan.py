"""``nostall plan`` and ``nostall simulate``: where to cut a model, and what that would cost."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from nostall.cli.console import Format, FormatOption, QuietOption, err, out, show_json, show_table
from nostall.core.errors import BadInput
from nostall.core.files import write_atomically
from nostall.parallel.cluster import load_cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.export import export_torchtitan
from nostall.parallel.files import load_plan, plan_document, planned_module
from nostall.parallel.outcome import Outcome, outcome
from nostall.parallel.plan import POLICIES, Policy, Workload
from nostall.parallel.plan.workload import ADAM_FP32, DEFAULT_GLOBAL_BATCH, HALF
from nostall.parallel.planners import PLANNERS, Effort, make_plan
from nostall.parallel.profile import Profile, load_profile
from nostall.report.plan.gantt import write_gantt
from nostall.report.plan.text import sentences, stage_table

_PYTHON = re.compile(r"\.py(:|$)")

GanttOption = Annotated[
    Path | None, typer.Option(help="Write the schedule as a figure (.svg or .html).")
]


def plan(
    profile: Annotated[
        str,
        typer.Argument(
            help="Profile (PipeDream graph text or JSON), or a module to measure: path.py:build."
        ),
    ],
    cluster: Annotated[
        Path,
        typer.Option(help="Cluster (TOML, see examples/clusters; or nvidia-smi topo -m's text)."),
    ],
    planner: Annotated[str, typer.Option(help=f"One of {', '.join(PLANNERS)}.")] = "nostall",
    global_batch: Annotated[
        int, typer.Option(min=1, help="Samples of an iteration.")
    ] = DEFAULT_GLOBAL_BATCH,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of a micro-batch; the profile's own.")
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Write the plan, for nostall simulate.")
    ] = None,
    gantt: GanttOption = None,
    seconds: Annotated[
        float | None, typer.Option(help="Time limit; by default due to the size.")
    ] = None,
    evaluations: Annotated[
        int | None, typer.Option(min=1, help="Plans that searches may simulate.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of searches.")] = 0,
    recompute: Annotated[
        bool, typer.Option(help="Re-compute activations where nothing else fits.")
    ] = True,
    state_factor: Annotated[
        float,
        typer.Option(help="Bytes of parameters, gradients, optimiser per parameter byte."),
    ] = ADAM_FP32,
    weight_gradient_share: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, help="Assumed where the profile has no weight gradients."),
    ] = HALF,
    layers: Annotated[
        str, typer.Option(help="How a module is cut: block, or leaf (inside blocks too).")
    ] = "block",
    device: Annotated[
        str | None,
        typer.Option(help="Where a module is measured: cpu or cuda; cuda where there is a GPU."),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="GiB of each GPU, for a topology, which does not say it.")
    ] = None,
    format: FormatOption = Format.TABLE,
    quiet: QuietOption = False,
) -> None:
    """Decide where to cut a model, where each stage runs, how often, and in which order."""
    if planner not in PLANNERS:
        raise BadPlan(f"planner {planner!r} is unknown; allowed are {', '.join(PLANNERS)}")
    if seconds is not None and not 0 < seconds < float("inf"):
        raise BadInput(f"--seconds {seconds}; allowed is a number above 0")
    machines = load_cluster(cluster, gpu_memory)
    module = profile if _PYTHON.search(profile) else None
    measured = _measured(profile, micro_batch, layers, device) if module else None
    work = Workload(
        measured or load_profile(Path(profile)),
        machines,
        global_batch,
        micro_batch,
        state_factor,
        weight_gradient_share,
    )
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=err,
        disable=quiet or not err.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("planning", total=1.0)
        effort = Effort.of(
            work,
            seconds=seconds,
            evaluations=evaluations,
            seed=seed,
            recompute=recompute,
            report=lambda part, what: bar.update(task, completed=part, description=what),
        )
        found = outcome(work, make_plan(work, planner, effort), planner)
    _finish(found, out_file, gantt, format, module)


def _measured(target: str, micro_batch: int | None, layers: str, device: str | None) -> Profile:
    """The profile of a module, measured here at the micro-batch's size."""
    from nostall.parallel.execute.order import device_of

    kind = device_of(device)
    from nostall.parallel.module import load_job, profile_job
    from nostall.parallel.module.layering import Granularity

    job = load_job(target)
    return profile_job(job, samples=micro_batch, device=kind, granularity=cast(Granularity, layers))


def simulate(
    plan: Annotated[Path, typer.Argument(help="A plan file of nostall plan.")],
    policy: Annotated[
        str | None, typer.Option(help=f"Another order: one of {', '.join(POLICIES)}.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the plan anew.")] = None,
    gantt: GanttOption = None,
    torchtitan: Annotated[
        Path | None,
        typer.Option(help="Write schedule.csv and module names for torchtitan to this folder."),
    ] = None,
    format: FormatOption = Format.TABLE,
) -> None:
    """Simulate a plan again, or the same stages in another order."""
    work, given, planner = load_plan(plan)
    if policy is not None:
        if policy not in get_args(Policy):
            raise BadPlan(f"policy {policy!r} is unknown; allowed are {', '.join(POLICIES)}")
        given = replace(given, policy=cast(Policy, policy), in_flight=None)
    if torchtitan is not None:
        export_torchtitan(work, given, torchtitan)
    _finish(outcome(work, given, planner), out_file, gantt, format, planned_module(plan))


def _finish(
    found: Outcome,
    out_file: Path | None,
    gantt: Path | None,
    format: Format,
    module: str | None,
) -> None:
    if gantt is not None:
        write_gantt(found, gantt)
    document = plan_document(found, module)
    if out_file is not None:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out_file, (json.dumps(document, indent=1) + "\n").encode())
    if format is Format.JSON:
        show_json(document)
        return
    _show(found)
    for path, what in ((gantt, "schedule"), (out_file, "plan")):
        if path is not None:
            out.print(f"{what + ':':10}{path}")


def _show(found: Outcome) -> None:
    columns, rows = stage_table(found)
    show_table(f"{found.work.profile.name} on {found.work.cluster.name}", columns, rows)
    for line in sentences(found):
        out.print(line)
