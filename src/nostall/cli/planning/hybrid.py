"""Pipelines whose stages are sharded, for ``nostall plan --planner sharding``.

With ``--micro-batch N`` the command plans these alone.  Without it, they compete with shardings of
the whole batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from nostall.cli.terminal.console import Format, out, show_json, show_table
from nostall.cli.terminal.progress import stage_bar
from nostall.core.errors import BadInput
from nostall.core.files import write_atomically
from nostall.core.plurals import pluralize
from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadModel, Infeasible
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.planners.sharding import ShardingPlan
from nostall.report.units import Scale

if TYPE_CHECKING:
    from nostall.parallel.module import Job
    from nostall.parallel.sharding.hybrid.planner import Hybrid
    from nostall.parallel.sharding.hybrid.search import HybridPlan, HybridStage

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
        """Micro-batches of a step."""
        return self.samples // self.micro_batch


@dataclass(frozen=True)
class Beside:
    """Result of the search for pipelines beside shardings."""

    sentence: str
    """What was found, or why no pipeline was planned."""
    hybrid: Hybrid | None = None
    request: HybridRequest | None = None

    def show_if_faster(
        self, plan: ShardingPlan, others: Sequence[ShardingPlan], out_file: Path | None,
        format: Format,
    ) -> bool:  # fmt: skip
        """Write and show the best pipeline if it is modelled to be faster than a sharding."""
        found, request = self.hybrid, self.request
        if found is None or request is None or found.best.kind == "sharding":
            return False
        if found.best.step_s >= plan.step_s:
            return False
        write_and_show_hybrid(found, request, out_file, format, [plan, *others])
        return True


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
    request: HybridRequest, job: Job, best: ShardingPlan, seconds: float, *, quiet: bool
) -> Beside:
    """The best pipeline, unless none can be faster than a sharding of the whole batch."""
    devices, count = len(request.cluster), request.micro_batches
    if devices == 1 or count < 2:
        return Beside("pipelines were not planned: they need two GPUs and two micro-batches")
    least_s = _work_s(best) / devices * (count + 1) / count
    if best.step_s <= least_s:
        return Beside(
            f"no pipeline of {count} micro-batches is faster under this model: two stages without "
            f"any transfer take {Scale('s', least_s)(least_s)} at least"
        )
    try:
        found = _plan(request, job, quiet, units=UNITS_BESIDE_SHARDINGS, seconds=seconds)
    except (BadModel, Infeasible) as error:
        return Beside(f"pipelines were not planned: {error}")
    pipelines = [plan for plan in (found.best, *found.by_kind.values()) if plan.kind != "sharding"]
    limit = "" if found.is_complete else "; the time limit ended the search for stages"
    if not pipelines:
        return Beside(f"no pipeline of {count} micro-batches was found{limit}", found, request)
    fastest = min(pipelines, key=lambda plan: plan.step_s)
    time = Scale("s", fastest.step_s)
    return Beside(
        f"the fastest pipeline found of {count} micro-batches takes {time(fastest.step_s)}, "
        f"modelled{limit}",
        found,
        request,
    )


def _work_s(plan: ShardingPlan) -> float:
    """Modelled seconds of all operators on one GPU."""
    from nostall.parallel.sharding.graph import replicated, strategy_of

    graph, prices = plan.prices.graph, plan.prices
    whole = replicated(graph)
    return sum(
        prices.operator_s(operator, strategy_of(graph, whole, number)) or 0.0
        for number, operator in enumerate(graph.operators)
    )


def default_micro_batch(samples: int, devices: int) -> int:
    """Samples of a micro-batch: those of at least twice as many micro-batches as GPUs, if the
    batch can be divided so."""
    counts = [n for n in range(1, samples + 1) if samples % n == 0]
    return samples // next((n for n in counts if n >= 2 * devices), counts[-1])


def _plan(
    request: HybridRequest, job: Job, quiet: bool, units: int | None = None,
    seconds: float = float("inf"),
) -> Hybrid:  # fmt: skip
    from nostall.parallel.module import Model
    from nostall.parallel.sharding.hybrid.planner import MAX_UNITS, HybridEffort, plan_hybrid

    until = monotonic() + seconds
    with stage_bar(enabled=not quiet) as bar:
        task = bar.add_task("stages", total=1.0)
        return plan_hybrid(
            Model(job),
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
    if out_file is not None:
        out_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out_file, (json.dumps(document, indent=1) + "\n").encode())
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
    for other in others:
        out.print(f"modelled step {scale(other.step_s)}: {other.name}, the whole batch at once")
    if out_file is not None:
        out.print(f"plan:     {out_file}")


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
