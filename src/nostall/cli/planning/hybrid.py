"""Pipelines whose stages are sharded, for ``nostall plan --planner sharding``.

With ``--micro-batch N`` the command plans these alone.  Without it, they compete with shardings of
the whole batch.  A plan of one stage, which shards the micro-batches, is among them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nostall.cli.terminal.console import Format, err, out, show_json, show_table
from nostall.cli.terminal.progress import stage_bar
from nostall.core.compile_clock import planning_clock
from nostall.core.errors import BadInput
from nostall.core.files.atomic import write_text_atomically
from nostall.core.text.plurals import pluralize
from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadModel, Infeasible
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.planners.sharding import ShardingPlan
from nostall.report.plan.sharding import speedup_sentence
from nostall.report.units import Scale

if TYPE_CHECKING:
    from nostall.parallel.module import Job
    from nostall.parallel.sharding.hybrid.planner import Hybrid
    from nostall.parallel.sharding.hybrid.search import HybridPlan, HybridStage

Show = Callable[[Sequence[ShardingPlan], Path | None, Format], None]
"""Writes the offered plan and shows it beside shardings of the whole batch."""


@dataclass(frozen=True)
class PipelineOffer:
    """The fastest plan of micro-batches that a search found, or why it found none."""

    sentence: str
    step_s: float | None = None
    """Modelled seconds of a step; None if there is no plan."""
    show: Show | None = None

    def shown_if_faster(
        self, plans: Sequence[ShardingPlan], out_file: Path | None, format: Format
    ) -> bool:
        """Write and show the plan if it is faster than the first of ``plans``, or if none is."""
        if self.show is None or self.step_s is None:
            return False
        if plans and self.step_s >= plans[0].step_s:
            return False
        self.show(plans, out_file, format)
        return True


_KINDS = {
    "sharding": "sharding in one stage",
    "pipeline": "pipeline",
    "hybrid": "pipeline with sharded stages",
}
"""Kinds of plans in sentences."""
UNITS_BESIDE_SHARDINGS = 4
"""Pieces of a model that stages consist of where no micro-batch is given."""


@dataclass(frozen=True)
class HybridRequest:
    """What pipelines are planned for."""

    module: str
    cluster: Cluster
    rates: DeviceRates
    samples: int
    micro_batch: int
    state_factor: float

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches in a step (samples / micro_batch)."""
        return self.samples // self.micro_batch


def show_hybrid(
    request: HybridRequest, out_file: Path | None, format: Format, *, quiet: bool
) -> None:
    """Plan pipelines of a micro-batch, write the best and print it beside pure plans."""
    from nostall.parallel.module import load_job

    if request.samples % request.micro_batch:
        raise BadInput(
            f"--global-batch {request.samples} is not a multiple of --micro-batch "
            f"{request.micro_batch}, which stages that are sharded need; change one of them"
        )
    found = _plan(request, load_job(request.module), quiet)
    write_and_show_hybrid(found, request, out_file, format)


def beside_shardings(
    request: HybridRequest, job: Job, plan: ShardingPlan | None, seconds: float, *, quiet: bool
) -> PipelineOffer:
    """Search for a pipeline that is faster than ``plan``, which shards the whole batch.

    None stands for a batch that no sharding of the whole serves.
    """
    devices, count = len(request.cluster), request.micro_batches
    if devices == 1 or count < 2:
        return PipelineOffer("pipelines were not planned: they need two GPUs and two micro-batches")
    if plan is not None:
        work_s = plan.prices.operators_s(replicated(plan.prices.graph))
        least_s = work_s / devices * (count + 1) / count
        if plan.step_s <= least_s:
            return PipelineOffer(
                f"no pipeline of {count} micro-batches is faster under this model: two stages "
                f"without any transfer take {Scale('s', least_s)(least_s)} at least"
            )
    try:
        found = _plan(request, job, quiet, units=UNITS_BESIDE_SHARDINGS, seconds=seconds)
    except (BadModel, Infeasible) as error:
        return PipelineOffer(f"pipelines were not planned: {error}")
    best = found.best
    limit = "" if found.is_complete else "; the time limit ended the search for stages"
    missing = f"; no pipeline was found: {found.why_one_stage}" if found.why_one_stage else ""

    def show(plans: Sequence[ShardingPlan], out_file: Path | None, format: Format) -> None:
        write_and_show_hybrid(found, request, out_file, format, plans)

    return PipelineOffer(
        f"the fastest plan found of {count} micro-batches, a {_KINDS[best.kind]}, takes "
        f"{Scale('s', best.step_s)(best.step_s)}, modelled{limit}{missing}",
        best.step_s,
        show,
    )


def default_micro_batch(samples: int, devices: int) -> int:
    """Default samples of a micro-batch.

    The fewest equal micro-batches that are at least twice the GPUs; one sample each if the batch
    has too few.
    """
    counts = [n for n in range(1, samples + 1) if samples % n == 0]
    return samples // next((n for n in counts if n >= 2 * devices), counts[-1])


def _plan(
    request: HybridRequest, job: Job, quiet: bool, units: int | None = None,
    seconds: float = float("inf"),
) -> Hybrid:  # fmt: skip
    from nostall.parallel.module.eager import compared_model
    from nostall.parallel.sharding.hybrid.planner import MAX_UNITS, HybridEffort, plan_hybrid

    until = planning_clock() + seconds
    with stage_bar(enabled=not quiet) as bar:
        task = bar.add_task("stages", total=1.0)
        return plan_hybrid(
            compared_model(job, err.print),
            request.cluster,
            request.rates,
            request.micro_batch,
            request.micro_batches,
            request.state_factor,
            HybridEffort(
                lambda fraction, text: bar.update(task, completed=fraction, description=text),
                units or MAX_UNITS,
                until,
            ),
        )


def write_and_show_hybrid(
    found: Hybrid,
    request: HybridRequest,
    out_file: Path | None,
    format: Format,
    others: Sequence[ShardingPlan] = (),
) -> None:
    """Write the best plan, then print it beside others; ``others`` shard the whole batch."""
    from nostall.parallel.sharding.hybrid.plan_file import hybrid_document

    batch, scale = (request.samples, request.micro_batch), Scale("s", found.best.step_s)
    stages = found.planned(found.best)
    document = hybrid_document(
        "sharding", request.module, batch, request.state_factor, stages, request.cluster,
        found.best.step_s,
    )  # fmt: skip
    speedup = _speedup(found, request)
    document["predicted_speedup"] = speedup
    if out_file is not None:
        write_text_atomically(out_file, json.dumps(document, indent=1) + "\n", parents=True)
    plans = {"best": found.best, **found.by_kind}
    if format is Format.JSON:
        summary = {
            "micro_batches": request.micro_batches,
            "table_entries": found.entries,
            "planned_entries": found.priced,
            "plans": {name: _record(plan) for name, plan in plans.items()},
            "shardings": [
                {"planner": plan.name, "predicted_step_s": plan.step_s} for plan in others
            ],
        }
        show_json({**document, **summary})
        return
    show_table(
        f"stages on {request.cluster.name}, {pluralize(request.micro_batches, 'micro-batch')}",
        ["layers", "GPUs", "modelled time of a micro-batch", "memory, GiB"],
        [_row(stage, plan, scale) for stage, plan in stages],
    )
    for name, own in plans.items():
        kind = f"{own.kind}, the best" if name == "best" else f"pure {name}"
        out.print(f"modelled step {scale(own.step_s)}: {kind}")
    if speedup is not None:
        out.print(speedup_sentence(speedup))
    for other in others:
        out.print(f"modelled step {scale(other.step_s)}: {other.name}, the whole batch at once")
    if out_file is not None:
        out.print(f"plan:     {out_file}")


def _speedup(found: Hybrid, request: HybridRequest) -> float | None:
    """Modelled speed-up of the best plan over one GPU; None if the whole model was not priced."""
    whole = found.by_kind.get("sharding")
    if whole is None:
        return None
    one_gpu_s = found.planned(whole)[0][1].one_gpu_s * request.micro_batches
    return one_gpu_s / found.best.step_s


def _row(stage: HybridStage, plan: ShardingPlan, scale: Scale) -> tuple[str, ...]:
    layers = f"{stage.first} to {stage.end - 1}"
    memory = f"{plan.memory.peak / 2**30:.3g}"
    return layers, str(stage.devices), scale(stage.seconds), memory


def _record(plan: HybridPlan) -> dict[str, Any]:
    return {
        "kind": plan.kind,
        "predicted_step_s": plan.step_s,
        "stages": [
            {"layers": [s.first, s.end], "gpus": s.devices, "seconds": s.seconds}
            for s in plan.stages
        ],
    }
