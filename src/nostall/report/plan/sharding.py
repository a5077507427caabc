"""Summary of a sharding plan for the terminal: tables of placements and collectives, sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from nostall.core.text.plurals import pluralize
from nostall.parallel.sharding.cost.device_mesh import mesh_text
from nostall.parallel.sharding.layer_table import parameter_rows
from nostall.parallel.sharding.placements import placement_text
from nostall.parallel.sharding.plan_file import collective_rows
from nostall.parallel.sharding.planners.sharding import ShardingPlan
from nostall.report.units import Scale, format_bytes

_GIB = 2**30
_EQUAL = 1 - 1e-9
"""Speed-ups from here on are at least 1; differences below are rounding."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def placement_table(plan: ShardingPlan) -> Table:
    """Column names and one row of cells for each group of equal parameters."""
    columns: tuple[str, ...] = ("parameter", "shape", "kept as", "read as", "result", "a GPU")
    rows: list[tuple[str, ...]] = [
        (
            row.name if row.count == 1 else f"{row.name} ({row.count})",
            "x".join(map(str, row.shape)),
            placement_text(row.placement),
            placement_text(row.read),
            placement_text(row.result),
            format_bytes(row.local_bytes * row.count),
        )
        for row in parameter_rows(plan)
    ]
    return columns, rows


def collective_table(plan: ShardingPlan) -> Table:
    """Column names and one row of cells for each kind of collective and mesh dimension."""
    time = Scale("s", plan.step_s)
    columns: tuple[str, ...] = (
        "collective",
        "mesh dimension",
        "calls",
        "bytes",
        f"modelled, {time.unit}",
    )
    rows: list[tuple[str, ...]] = [
        (
            str(row["kind"]),
            str(row["mesh_dim"]),
            str(row["calls"]),
            format_bytes(row["bytes"]),
            time.number(row["seconds"]),
        )
        for row in collective_rows(plan)
    ]
    return columns, rows


def runner_up_table(plan: ShardingPlan, others: Sequence[ShardingPlan]) -> Table:
    """Column names and one row of cells for the plan and each runner-up."""
    time = Scale("s", plan.step_s)
    memory = min(plan.prices.mesh.cluster.memory)
    columns: tuple[str, ...] = (
        "plan",
        "mesh",
        f"modelled step, {time.unit}",
        "memory, GiB",
        "fits",
    )
    rows: list[tuple[str, ...]] = [
        (
            own.name,
            mesh_text(own.prices.graph.mesh),
            time.number(own.step_s),
            f"{own.memory.peak / _GIB:.3g}",
            "yes" if own.fits(memory) else "no",
        )
        for own in (plan, *others)
    ]
    return columns, rows


def sharding_lead(plan: ShardingPlan, others: Sequence[ShardingPlan]) -> str:
    """The modelled step in a sentence, beside data parallelism if that is one of ``others``."""
    time = Scale("s", plan.step_s)
    text = f"modelled step {time(plan.step_s)}"
    peer = data_parallel(others)
    if peer is None or plan.name == peer.name:
        return text
    gain = f"{peer.step_s / plan.step_s:.2f}"
    words = "no faster than" if gain == "1.00" else f"{gain}× as fast as"
    return f"{text}, {words} data parallelism ({time(peer.step_s)})"


def data_parallel(plans: Sequence[ShardingPlan]) -> ShardingPlan | None:
    """The fastest plan of data parallelism; None without one."""
    found = [plan for plan in plans if plan.name == "data-parallel"]
    return min(found, key=lambda plan: plan.step_s, default=None)


def sharding_cards(
    plan: ShardingPlan, others: Sequence[ShardingPlan]
) -> list[tuple[str, str, str]]:
    """Label, number and detail of the plan's headlines, beside data parallelism if it is given."""
    time, peer = Scale("s", plan.step_s), data_parallel(others)
    one_gpu_s, exposed = plan.one_gpu_s, time(plan.times.exposed_s)

    def own(each: ShardingPlan) -> tuple[str, str, str]:
        speedup, peak = one_gpu_s / each.step_s, each.memory.peak / _GIB
        return time(each.step_s), f"{speedup:.2f}×", f"{peak:.3g} GiB"

    beside = [f"data parallelism: {value}" for value in own(peer)] if peer else ["", "", ""]
    names = ("step", "speed-up over one GPU", "memory of a GPU")
    rows = zip(names, own(plan), beside, strict=True)
    collectives = time(plan.times.collectives_s)
    return [
        *((f"{name}, modelled", value, detail) for name, value, detail in rows),
        ("collectives, modelled", collectives, f"{exposed} are not hidden behind operators"),
    ]


def sharding_sentences(plan: ShardingPlan) -> list[str]:
    """Lines on the modelled step, the proof of the plan, its memory and its limits."""
    time, graph = Scale("s", plan.step_s), plan.prices.graph
    memory = min(plan.prices.mesh.cluster.memory) / _GIB
    lines = [
        f"modelled step {time(plan.step_s)}: operators {time(plan.times.operators_s)}, collectives "
        f"{time(plan.times.collectives_s)}, of which {time(plan.times.exposed_s)} are not hidden "
        f"behind operators; the optimiser takes {time(plan.update_s)} more",
        f"modelled memory of a GPU {plan.memory.peak / _GIB:.3g} of {memory:.3g} GiB: "
        f"{plan.memory.state / _GIB:.3g} GiB of parameter state, "
        f"{plan.memory.tensors / _GIB:.3g} GiB of other tensors",
    ]
    lines.append(speedup_sentence(plan.one_gpu_s / plan.step_s))
    if plan.is_proven:
        lines.append(
            "the plan meets its bound: under this model, no plan that treats equal layers equally "
            "is faster"
        )
    elif plan.bound_s:
        lines.append(
            f"under this model, a plan that treats equal layers equally takes {time(plan.bound_s)} "
            "at least"
        )
    if not plan.prices.mesh.cluster.latency.any():
        lines.append(
            "note: the cluster file has no latency, so small collectives take longer than "
            "modelled; measure it and add latency_us"
        )
    if graph.without_rule:
        names = [f"{name} ({count})" for name, count in Counter(graph.without_rule).most_common(5)]
        lines.append(
            f"note: {pluralize(len(graph.without_rule), 'operator')} without a sharding rule run "
            f"replicated: {', '.join(names)}"
        )
    return lines


def speedup_sentence(speedup: float) -> str:
    """A line on the modelled speed-up of a plan over one GPU; it says if that is below 1."""
    line = f"modelled speed-up {speedup:.4g}x over one GPU"
    return line if speedup >= _EQUAL else f"{line}: this plan is SLOWER than one GPU"
