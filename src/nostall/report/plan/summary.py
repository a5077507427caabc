"""Summary of an evaluated plan for the terminal and the HTML page: a table of stages, sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nostall.core.text.plurals import pluralize
from nostall.parallel.evaluation import PlanEvaluation
from nostall.report.units import Scale

_GIB = 2**30


def stage_table(evaluation: PlanEvaluation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Column names and one row of cells per stage; all times have the same unit."""
    costs, memory = evaluation.timeline.costs, evaluation.memory
    time = Scale("s", max(*costs.forward, *costs.backward, 1e-9))
    time_columns = ("forward", "backward", "transfer", "all-reduce")
    columns = (
        "stage",
        "layers",
        "GPUs",
        *(f"{name}, {time.unit}" for name in time_columns),
        "in flight",
        f"{'memory' if memory.measured else 'memory at least'}, GiB",
    )
    rows = []
    for s, stage in enumerate(evaluation.plan.stages):
        worker = costs.worker[s]
        transfers = costs.forward_transfers
        seconds = (
            costs.forward[s],
            costs.backward[s] + costs.weight_gradient[s],
            transfers[s].seconds if s < len(transfers) else 0.0,
            costs.allreduce[s].seconds,
        )
        peak, capacity = memory.peak[worker] / _GIB, memory.capacity[worker] / _GIB
        rows.append(
            (
                str(s),
                ranges(range(stage.first, stage.end)),
                ranges(stage.gpus),
                *(time.number(value) for value in seconds),
                str(evaluation.timeline.peak_in_flight[s]),
                f"{peak:.3g} of {capacity:.3g}",
            )
        )
    return columns, rows


def lead(evaluation: PlanEvaluation, beside: PlanEvaluation | None) -> str:
    """The answer of the page in a sentence: the plan, and its time beside data parallelism."""
    stages = evaluation.plan.stages
    iteration_s = evaluation.timeline.iteration_s
    text = (
        f"{pluralize(len(stages), 'stage')} on {pluralize(sum(len(s.gpus) for s in stages), 'GPU')}"
        f": an iteration takes {Scale('s', iteration_s)(iteration_s)} (modelled)"
    )
    if beside is not None:
        text += f", {_gain(beside.timeline.iteration_s / iteration_s, '× as fast')}"
        text += " as data parallelism" if text.endswith("as fast") else " than data parallelism"
    return f"{text}."


def cards(evaluation: PlanEvaluation, beside: PlanEvaluation | None) -> list[tuple[str, str, str]]:
    """Label, number and detail of the plan's headlines, beside data parallelism if it is given."""
    iteration_s = evaluation.timeline.iteration_s
    time = Scale("s", iteration_s)
    found = [
        ("iteration, modelled", time(iteration_s), ""),
        ("speed-up over one GPU, modelled", f"{evaluation.speedup:.2f}×", ""),
    ]
    if beside is not None:
        peer_s = beside.timeline.iteration_s
        found = [
            (found[0][0], found[0][1], f"data parallelism: {Scale('s', peer_s)(peer_s)}"),
            (found[1][0], found[1][1], f"data parallelism: {beside.speedup:.2f}×"),
            (
                "beside data parallelism, modelled",
                _gain(peer_s / iteration_s, "×"),
                "time of data parallelism / time of this plan",
            ),
        ]
    idle = f"{1 - evaluation.utilization:.0%}"
    return [*found, ("bubble, modelled", idle, "of the GPUs' time: they wait for another stage")]


def sentences(evaluation: PlanEvaluation, beside: PlanEvaluation | None = None) -> list[str]:
    """One line on the plan, lines on its modelled time and its components, and the notes."""
    workload, plan = evaluation.workload, evaluation.plan
    iteration_s = evaluation.timeline.iteration_s
    time = Scale("s", iteration_s)
    recompute = ", re-computation" if plan.recompute else ""
    lines = [
        f"{evaluation.planner}: {plan.split}, order {plan.policy}{recompute}, "
        f"{workload.micro_batches} micro-batches of {evaluation.micro_batch_sizes} samples",
        f"modelled iteration {time(iteration_s)}, modelled speed-up {evaluation.speedup:#.4g}x "
        f"over one GPU ({evaluation.utilization:.0%} of the cluster busy)",
    ]
    if beside is not None:
        peer_s = beside.timeline.iteration_s
        lines.append(
            f"beside data parallelism, modelled {Scale('s', peer_s)(peer_s)}: "
            f"{_gain(peer_s / iteration_s, 'x as fast')}"
        )
    components = evaluation.time_components()
    if "closed_form_steady_s" in components:
        phases = [
            f"{name.replace('_', '-')} {time(components[f'closed_form_{name}_s'])}"
            for name in ("warm_up", "steady", "ending")
        ]
        lines.append(f"closed form (DAPPLE's L): {', '.join(phases)}")
    lower_bound = max(components["busiest_resource_s"], components["critical_path_s"])
    lines.append(
        f"lower bound of this mapping in any order {time(lower_bound)}; "
        f"after the last backward pass {time(components['after_last_backward_s'])}"
    )
    return lines + [f"note: {note}" for note in evaluation.notes()]


_ORDERS: Mapping[str, str] = {
    "gpipe": "gpipe: all forward passes, then all backward passes",
    "1f1b": "1f1b: forward and backward passes in turn",
    "pa": "pa: forward and backward passes in turn, as DAPPLE's PA",
    "pb": "pb: forward and backward passes in turn, with more micro-batches in flight to hide "
    "transfers, as DAPPLE's PB",
    "list": "list: what is ready first runs first",
    "zero-bubble": "zero-bubble: gradients of weights fill the gaps",
    "interleaved": "interleaved: each GPU has several stages",
}
"""The orders of the passes in words."""
_MAX_STAGES = 8
"""Stages that a sentence lists."""


def reading(evaluation: PlanEvaluation) -> str:
    """What the plan's short form says, in words."""
    stages, split = evaluation.plan.stages, evaluation.plan.split
    order = _ORDERS.get(evaluation.plan.policy, evaluation.plan.policy)
    if split == "straight":
        words = "one GPU in each stage"
    else:
        shown = [f"stage {at} has {pluralize(len(s.gpus), 'GPU')}" for at, s in enumerate(stages)]
        words = ", ".join(shown[:_MAX_STAGES]) + (", …" if len(shown) > _MAX_STAGES else "")
    return f"{split}: {words}. Order {order}."


def exposed_allreduce(beside: PlanEvaluation) -> list[str]:
    """Why data parallelism is slow, if most of its time is an all-reduce that nothing hides."""
    total = beside.timeline.iteration_s
    exposed = beside.time_components()["after_last_backward_s"]
    if exposed < total / 2:
        return []
    time = Scale("s", total)
    return [
        f"data parallelism, modelled: {time(exposed)} of its {time(total)} come after the last "
        "backward pass, where the all-reduce of the gradients has nothing to hide behind"
    ]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as ranges: ``0-7, 9`` for the numbers 0 to 7 and 9."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _gain(ratio: float, unit: str) -> str:
    """A gain to two decimals; none is said in words."""
    text = f"{ratio:.2f}"
    return "no faster" if text == "1.00" else text + unit
