"""Plans for torchtitan: the schedule as CSV, and the modules of each stage.

What torchtitan 0.3 reads: ``parallelism.pipeline_parallel_schedule_csv``, a row of actions for each
pipeline rank, and ``parallelism.module_fqns_per_model_part``, module names for each stage.  It
drops what it does not understand without a word (a name inside a block keeps nothing of the block),
so what it cannot run is refused here.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from nostall.core.files import write_atomically
from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.program import program


def export_torchtitan(work: Workload, plan: Plan, folder: Path) -> tuple[Path, Path]:
    """Write ``schedule.csv`` and ``torchtitan.json`` to the folder; returns both.

    Raises :class:`BadPlan` for what torchtitan has no word for: unequal replication, one stage,
    stages that are not dealt out in turn, cuts inside a block, batches that do not divide evenly,
    re-computation of whole stages.
    """
    table, settings = folder / "schedule.csv", folder / "torchtitan.json"
    record = torchtitan_settings(work, plan, str(table.resolve()))
    rows = schedule_csv(work, plan)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(table, rows.encode())
    write_atomically(settings, (json.dumps(record, indent=1) + "\n").encode())
    return table, settings


def schedule_csv(work: Workload, plan: Plan) -> str:
    """One row for each pipeline rank: 0F0, 0B0, ..., as torch's runtime loads it."""
    _check(work, plan)
    operations = program(work, plan)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for gpus in _ranks(plan):
        writer.writerow(f"{op.stage}{op.kind}{op.micro_batch}" for op in operations[gpus])
    return text.getvalue()


def torchtitan_settings(work: Workload, plan: Plan, table: str) -> dict[str, Any]:
    """The ``parallelism`` and ``training`` settings.  Module names are those of the layers."""
    _check(work, plan)
    replicas, ranks = len(plan.stages[0].gpus), len(_ranks(plan))
    return {
        "parallelism": {
            "pipeline_parallel_degree": ranks,
            "data_parallel_replicate_degree": replicas,
            # Of the schedule torchtitan takes only how stages are dealt out; the CSV is the rest.
            "pipeline_parallel_schedule": "Interleaved1F1B" if plan.interleaved else "1F1B",
            "pipeline_parallel_schedule_csv": table,
            "pipeline_parallel_microbatch_size": work.samples // replicas,
            "module_fqns_per_model_part": _modules(work, plan),
        },
        "training": {
            "local_batch_size": work.global_batch // replicas,
            "global_batch_size": work.global_batch,
        },
    }


def _ranks(plan: Plan) -> list[tuple[int, ...]]:
    """The GPUs of each pipeline rank."""
    return list(dict.fromkeys(stage.gpus for stage in plan.stages))


def _modules(work: Workload, plan: Plan) -> list[list[str]]:
    """Children of the model and elements of its lists, by stage."""
    found = []
    stage_of: dict[str, int] = {}
    for s, stage in enumerate(plan.stages):
        layers = work.profile.layers[stage.first : stage.end]
        names = list(dict.fromkeys(_module(layer.name) for layer in layers))
        for name in names:
            if stage_of.setdefault(name, s) != s:
                raise BadPlan(
                    f"{name} is in stages {stage_of[name]} and {s}; torchtitan cuts between the "
                    "children of a model and the elements of its lists only; plan with "
                    "--layers block, or run this plan with nostall launch"
                )
        found.append(names)
    return found


def _module(layer: str) -> str:
    """``layers.3.attention#2`` is in ``layers.3``, ``norm.weight`` in ``norm``."""
    parts = layer.partition("#")[0].split(".")
    return ".".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1])


def _check(work: Workload, plan: Plan) -> None:
    if len(plan.stages) < 2:
        raise BadPlan("the plan has one stage; torchtitan needs no schedule for data parallelism")
    if len({len(stage.gpus) for stage in plan.stages}) > 1:
        raise BadPlan(
            f"the plan replicates its stages {plan.split}; torchtitan knows equal replication "
            "only; plan with --planner even, or run it with nostall launch"
        )
    ranks = _ranks(plan)
    dealt = [ranks.index(stage.gpus) for stage in plan.stages]
    if len(dealt) % len(ranks) or dealt != [s % len(ranks) for s in range(len(dealt))]:
        raise BadPlan(
            f"the stages lie on pipeline ranks {dealt[:12]}; torchtitan deals them out in turn "
            "(0 1 0 1), the same number for each; run this plan with nostall launch"
        )
    replicas = len(plan.stages[0].gpus)
    if work.samples % replicas or work.global_batch % work.samples:
        raise BadPlan(
            f"{work.global_batch} samples in micro-batches of {work.samples} over {replicas} "
            "replicas: torchtitan wants whole numbers of each; change --global-batch or "
            "--micro-batch"
        )
    if plan.recompute:
        raise BadPlan(
            "the plan re-computes whole stages, torchtitan single layers; plan with "
            "--no-recompute, or run this plan with nostall launch"
        )
