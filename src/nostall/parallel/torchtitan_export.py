"""Export of a pipeline plan: for torchtitan, and as text for ``torch.distributed.pipelining``.

torchtitan 0.3 reads ``parallelism.pipeline_parallel_schedule_csv``, one row of actions per pipeline
rank, and ``parallelism.module_fqns_per_model_part``, the names of each stage's modules.  It drops
names that it does not find without an error (for a name inside a block, it drops the block), so
plans that it cannot run are rejected here.  The text cuts the module by PyTorch's own tracing at
the modules with which stages begin, runs one of its schedules, and checks a step against a single
process.
"""

from __future__ import annotations

import csv
import io
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from nostall.core.files.atomic import create_folder, write_text_atomically
from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Plan, Policy, Workload
from nostall.parallel.rank_schedule import rank_schedules

_SCHEDULES: dict[Policy, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
}
"""Classes of ``torch.distributed.pipelining`` by the order that they run."""


def export_torchtitan(workload: Workload, plan: Plan, folder: Path) -> tuple[Path, Path]:
    """Write ``schedule.csv`` and ``torchtitan.json`` to a folder; returns both paths.

    Raises :class:`BadPlan` if torchtitan cannot run the plan: unequal replication, one stage,
    stages not assigned to ranks in rotation, cuts inside a block, batches that do not divide
    evenly, or re-computation of whole stages.
    """
    table, settings = folder / "schedule.csv", folder / "torchtitan.json"
    record = torchtitan_settings(workload, plan, str(table.resolve()))
    rows = schedule_csv(workload, plan)
    create_folder(folder)
    write_text_atomically(table, rows)
    write_text_atomically(settings, json.dumps(record, indent=1) + "\n")
    return table, settings


def schedule_csv(workload: Workload, plan: Plan) -> str:
    """One row of actions (0F0, 0B0, ...) per pipeline rank, in the format of torch's runtime."""
    _check_supported(workload, plan)
    schedules = rank_schedules(workload, plan)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for gpus in _pipeline_ranks(plan):
        writer.writerow(f"{op.stage}{op.kind}{op.micro_batch}" for op in schedules[gpus])
    return text.getvalue()


def torchtitan_settings(workload: Workload, plan: Plan, table: str) -> dict[str, Any]:
    """The ``parallelism`` and ``training`` settings; ``table`` is the path of the schedule CSV.

    Names of the profile's layers must be names of the model's modules.
    """
    _check_supported(workload, plan)
    replicas, ranks = len(plan.stages[0].gpus), len(_pipeline_ranks(plan))
    return {
        "parallelism": {
            "pipeline_parallel_degree": ranks,
            "data_parallel_replicate_degree": replicas,
            # torchtitan takes only the stage-to-rank assignment from this; the order is in the CSV.
            "pipeline_parallel_schedule": "Interleaved1F1B" if plan.interleaved else "1F1B",
            "pipeline_parallel_schedule_csv": table,
            "pipeline_parallel_microbatch_size": workload.micro_batch_samples // replicas,
            "module_fqns_per_model_part": _module_names(workload, plan),
        },
        "training": {
            "local_batch_size": workload.global_batch // replicas,
            "global_batch_size": workload.global_batch,
        },
    }


def export_stages(workload: Workload, plan: Plan, path: Path) -> None:
    """Write Python text that builds PyTorch's pipeline stages and schedule, with a check.

    Raises :class:`BadPlan` if no schedule of PyTorch has the order of the plan, and for the plans
    that :func:`export_torchtitan` rejects, but cuts inside a block are allowed.
    """
    write_text_atomically(path, stages_text(workload, plan), parents=True)


def stages_text(workload: Workload, plan: Plan) -> str:
    """The text of :func:`export_stages`."""
    _check_supported(workload, plan, "torch.distributed.pipelining")
    schedule = _SCHEDULES.get(plan.policy)
    if schedule is None or plan.interleaved != (plan.policy == "interleaved"):
        kind = "several stages" if plan.interleaved else "one stage"
        raise BadPlan(
            f"the plan has the order {plan.policy} with {kind} on a GPU, for which PyTorch has no "
            f"schedule of its own; allowed are {', '.join(_SCHEDULES)} (interleaved with several): "
            "give --policy, or run this plan with nostall launch"
        )
    layers = workload.profile.layers
    split = [layers[stage.first].name for stage in plan.stages[1:]]
    if again := [name for name in split if "#" in name]:
        raise BadPlan(
            f"a stage begins with {again[0]}, a later call of a module, where PyTorch's tracing "
            "cannot cut; plan with --layers block, or run this plan with nostall launch"
        )
    ranks = _pipeline_ranks(plan)
    if any(list(column) != sorted(column) for column in zip(*ranks, strict=True)):
        raise BadPlan(
            f"the stages are on GPUs {', '.join(map(str, ranks[:8]))}, and PyTorch numbers the "
            "processes of a pipeline in ascending order; run this plan with nostall launch"
        )
    head = (
        f"Pipeline of {workload.profile.name} in {len(plan.stages)} stages on "
        f"{sum(map(len, ranks))} processes, by nostall."
    )
    values = {
        "HEAD": head,
        "WORLD": str(sum(map(len, ranks))),
        "SCHEDULE": schedule,
        "SPLIT": repr(split),
        "GRID": repr([list(gpus) for gpus in ranks]),
        "MICRO_BATCHES": str(workload.micro_batches),
    }
    text = (files(__package__) / "pipeline_template.txt").read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    return text


def _pipeline_ranks(plan: Plan) -> list[tuple[int, ...]]:
    """The GPUs of each pipeline rank."""
    return list(dict.fromkeys(stage.gpus for stage in plan.stages))


def _module_names(workload: Workload, plan: Plan) -> list[list[str]]:
    """Per stage, the names of the model's children and of the elements of its lists."""
    names_by_stage = []
    stage_of: dict[str, int] = {}
    for s, stage in enumerate(plan.stages):
        layers = workload.profile.layers[stage.first : stage.end]
        names = list(dict.fromkeys(_top_module(layer.name) for layer in layers))
        for name in names:
            if stage_of.setdefault(name, s) != s:
                raise BadPlan(
                    f"{name} is in stages {stage_of[name]} and {s}; torchtitan cuts only between "
                    "the children of a model and the elements of its lists; plan with "
                    "--layers block, or run this plan with nostall launch"
                )
        names_by_stage.append(names)
    return names_by_stage


def _top_module(layer: str) -> str:
    """``layers.3`` for the layer ``layers.3.attention#2``, ``norm`` for ``norm.weight``."""
    parts = layer.partition("#")[0].split(".")
    return ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])


def _check_supported(workload: Workload, plan: Plan, runner: str = "torchtitan") -> None:
    """Raise :class:`BadPlan` if ``runner`` cannot run the plan."""
    if len(plan.stages) < 2:
        raise BadPlan(f"the plan has one stage; {runner} needs no schedule for data parallelism")
    if len({len(stage.gpus) for stage in plan.stages}) > 1:
        raise BadPlan(
            f"the plan replicates its stages {plan.split}; {runner} supports only equal "
            "replication; plan with --planner even, or run it with nostall launch"
        )
    ranks = _pipeline_ranks(plan)
    rank_of_stage = [ranks.index(stage.gpus) for stage in plan.stages]
    rotation = [s % len(ranks) for s in range(len(plan.stages))]
    if len(plan.stages) % len(ranks) or rank_of_stage != rotation:
        raise BadPlan(
            f"the stages are on pipeline ranks {rank_of_stage[:12]}; {runner} assigns them in "
            "rotation (0 1 0 1), the same number to each rank; run this plan with nostall launch"
        )
    replicas, samples = len(plan.stages[0].gpus), workload.micro_batch_samples
    if samples % replicas or workload.global_batch % samples:
        raise BadPlan(
            f"{workload.global_batch} samples in micro-batches of {samples} over {replicas} "
            f"replicas: {runner} needs whole numbers of micro-batches and of samples per replica; "
            "change --global-batch or --micro-batch"
        )
    if plan.recompute:
        raise BadPlan(
            f"the plan re-computes whole stages, which {runner} does not; plan with "
            "--no-recompute, or run this plan with nostall launch"
        )
