"""Plans for torchtitan: the schedule as CSV, and the modules of each stage.

What torchtitan reads: ``parallelism.pipeline_parallel_schedule_csv``, a row of actions for each
pipeline rank, and ``parallelism.module_fqns_per_model_part``, module names for each stage.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from nostall.core.run import write_atomically
from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.program import program


def export_torchtitan(work: Workload, plan: Plan, folder: Path) -> tuple[Path, Path]:
    """Write ``schedule.csv`` and ``torchtitan.json`` to the folder; returns both.

    Raises :class:`BadPlan` for what torchtitan has no word for: unequal replication, one stage.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table, settings = folder / "schedule.csv", folder / "torchtitan.json"
    write_atomically(table, schedule_csv(work, plan).encode())
    record = {"parallelism": torchtitan_settings(work, plan, str(table.resolve()))}
    write_atomically(settings, (json.dumps(record, indent=1) + "\n").encode())
    return table, settings


def schedule_csv(work: Workload, plan: Plan) -> str:
    """One row for each pipeline rank: 0F0, 0B0, ..., as torch's runtime loads it."""
    _check(plan)
    operations = program(work, plan)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for gpus in dict.fromkeys(stage.gpus for stage in plan.stages):
        writer.writerow(f"{op.stage}{op.kind}{op.micro_batch}" for op in operations[gpus])
    return text.getvalue()


def torchtitan_settings(work: Workload, plan: Plan, table: str) -> dict[str, Any]:
    """The ``[parallelism]`` settings.  Module names are those of the profile's layers."""
    _check(plan)
    names = [layer.name.partition("#")[0] for layer in work.profile.layers]
    return {
        "pipeline_parallel_degree": len({stage.gpus for stage in plan.stages}),
        "data_parallel_replicate_degree": len(plan.stages[0].gpus),
        "pipeline_parallel_schedule_csv": table,
        "pipeline_parallel_microbatch_size": work.samples // len(plan.stages[0].gpus),
        "module_fqns_per_model_part": [
            list(dict.fromkeys(names[stage.first : stage.end])) for stage in plan.stages
        ],
    }


def _check(plan: Plan) -> None:
    if len(plan.stages) < 2:
        raise BadPlan("the plan has one stage; torchtitan needs no schedule for data parallelism")
    if len({len(stage.gpus) for stage in plan.stages}) > 1:
        raise BadPlan(
            f"the plan replicates its stages {plan.split}; torchtitan knows equal replication "
            "only; plan with --planner even, or run it with nostall launch"
        )
