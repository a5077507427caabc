"""Making a plan fit into memory by holding fewer micro-batches at a time."""

from __future__ import annotations

import math
from dataclasses import replace

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.simulate.memory import fits_bound, held_bytes, state_bytes, working_bytes
from nostall.parallel.simulate.orders import caps


def fitted(work: Workload, plan: Plan) -> Plan | None:
    """The plan with D, the micro-batches that fit, as a limit per stage; None if not even one.

    The plan itself when nothing needs to be limited.
    """
    if fits_bound(work, plan):
        return plan
    if plan.interleaved or plan.policy == "gpipe" or len(plan.stages) == 1:
        return None
    limits = []
    for stage, cap in zip(plan.stages, caps(plan, work.micro_batches), strict=True):
        memory = min(work.cluster.memory[g] for g in stage.gpus)
        free = memory - state_bytes(work, stage) - working_bytes(work, stage, plan.recompute, False)
        one = held_bytes(work, stage, plan.recompute, False)
        room = cap if one <= 0 else math.floor(free / one)
        if free < 0 or room < 1:
            return None
        limits.append(min(cap, room))
    limited = replace(plan, in_flight=tuple(limits))
    return limited if fits_bound(work, limited) else None
