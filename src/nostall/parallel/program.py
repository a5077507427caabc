"""What each rank does, in order: the simulator's order, as a list of operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.simulate import simulate
from nostall.parallel.slices import Slices

Kind = Literal["F", "B", "I", "W"]
"""Forward; backward; its two halves: gradients of inputs, gradients of weights."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One pass of one micro-batch through one stage."""

    kind: Kind
    stage: int
    micro_batch: int


def program(work: Workload, plan: Plan) -> dict[tuple[int, ...], list[Operation]]:
    """The operations of each group of GPUs, in the order in which the simulator ran them.

    That order has run once, so no operation waits for one that comes later: it cannot block.
    """
    if len(plan.stages) == 1:
        count = Slices(work, plan).micro_batches
        pairs = [Operation(kind, 0, m) for m in range(count) for kind in ("F", "B")]
        return {plan.stages[0].gpus: pairs}
    timeline = simulate(work, plan)
    kinds: tuple[Kind, ...] = ("F", "I", "W") if timeline.split else ("F", "B")
    keyed: dict[tuple[int, ...], list[tuple[tuple[float, ...], Operation]]] = {}
    for k, kind in enumerate(kinds):
        for s, stage in enumerate(plan.stages):
            for m in range(work.micro_batches):
                start = float(timeline.starts[k, s, m])
                end = start + float(timeline.durations[k, s])
                # Operations that take no time may begin at the same moment: first things first.
                key = (start, end, k, s if k == 0 else -s, m)
                keyed.setdefault(stage.gpus, []).append((key, Operation(kind, s, m)))
    return {
        gpus: [operation for _, operation in sorted(found, key=lambda pair: pair[0])]
        for gpus, found in keyed.items()
    }
