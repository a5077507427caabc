"""``nostall plan --planner sharding --micro-batch N``: pipeline stages that are sharded."""

from __future__ import annotations

from typing import Any

from nostall.cli.terminal.console import Format, out, show_json, show_table
from nostall.cli.terminal.progress import stage_bar
from nostall.core.errors import BadInput
from nostall.core.plurals import pluralize
from nostall.parallel.cluster import Cluster
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.report.units import Scale


def show_hybrid(
    module: str,
    cluster: Cluster,
    rates: DeviceRates,
    batch: tuple[int, int],
    state_factor: float,
    format: Format,
    *,
    quiet: bool,
) -> None:
    """Plan a hybrid and print it beside pure plans; ``batch`` is (samples, of a micro-batch)."""
    from nostall.parallel.module import Model, load_job
    from nostall.parallel.sharding.hybrid.planner import plan_hybrid

    samples, own = batch
    if samples % own:
        raise BadInput(
            f"--global-batch {samples} is not a multiple of --micro-batch {own}, which stages that "
            "are sharded need; change one of them"
        )
    model = Model(load_job(module))
    with stage_bar(enabled=not quiet) as bar:
        task = bar.add_task("stages", total=1.0)
        found = plan_hybrid(
            model,
            cluster,
            rates,
            own,
            samples // own,
            state_factor,
            lambda fraction, text: bar.update(task, completed=fraction, description=text),
        )
    plans = {"best": found.best, **found.by_kind}
    if format is Format.JSON:
        show_json({
            "kind": "modelled",
            "micro_batches": samples // own,
            "table_entries": found.entries,
            "planned_entries": found.priced,
            "plans": {name: _record(plan) for name, plan in plans.items()},
        })  # fmt: skip
        return
    scale = Scale("s", found.best.step_s)
    show_table(
        f"stages on {cluster.name}, {pluralize(samples // own, 'micro-batch')}",
        ["layers", "GPUs", "modelled time of a micro-batch"],
        [
            [f"{s.first} to {s.end - 1}", str(s.devices), scale(s.seconds)]
            for s in found.best.stages
        ],
    )
    for name, plan in plans.items():
        kind = f"{plan.kind}, the best" if name == "best" else f"pure {name}"
        out.print(f"modelled step {scale(plan.step_s)}: {kind}")


def _record(plan: Any) -> dict[str, Any]:
    return {
        "kind": plan.kind,
        "predicted_step_s": plan.step_s,
        "stages": [
            {"layers": [s.first, s.end], "gpus": s.devices, "seconds": s.seconds}
            for s in plan.stages
        ],
    }
