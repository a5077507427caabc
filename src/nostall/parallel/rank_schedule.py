"""Schedules of ranks: the operations of each group of GPUs, in the order of the simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.simulate import simulate
from nostall.parallel.slices import Slices

OperationKind = Literal["F", "B", "I", "W"]
"""Forward pass, backward pass, and the halves of a split backward pass: gradients of inputs (I) and
gradients of weights (W)."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one micro-batch through one stage."""

    kind: OperationKind
    stage: int
    micro_batch: int


def rank_schedules(workload: Workload, plan: Plan) -> dict[tuple[int, ...], list[Operation]]:
    """The operations of each group of GPUs in the order in which the simulator started them.

    The simulator has run this order to its end, so it cannot deadlock.
    """
    if len(plan.stages) == 1:
        count = Slices(workload, plan).micro_batches
        operations = [Operation(kind, 0, m) for m in range(count) for kind in ("F", "B")]
        return {plan.stages[0].gpus: operations}
    timeline = simulate(workload, plan)
    kinds: tuple[OperationKind, ...] = ("F", "I", "W") if timeline.splits_backward else ("F", "B")
    keyed: dict[tuple[int, ...], list[tuple[tuple[float, ...], Operation]]] = {}
    for k, kind in enumerate(kinds):
        for s, stage in enumerate(plan.stages):
            for m in range(workload.micro_batches):
                start = float(timeline.operation_starts[k, s, m])
                end = start + float(timeline.durations[k, s])
                # Operations that take no time may start at the same moment.  The rest of the key
                # sorts them by kind, then by stage: ascending for forward passes, else descending.
                key = (start, end, k, s if k == 0 else -s, m)
                keyed.setdefault(stage.gpus, []).append((key, Operation(kind, s, m)))
    return {
        gpus: [operation for _, operation in sorted(pairs, key=lambda pair: pair[0])]
        for gpus, pairs in keyed.items()
    }
