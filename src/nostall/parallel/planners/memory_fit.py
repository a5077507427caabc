"""Adaptation of a plan to the GPUs' memory by limiting the micro-batches in flight."""

from __future__ import annotations

import math
from dataclasses import replace

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.simulate.memory import held_bytes, may_fit, state_bytes, working_bytes
from nostall.parallel.simulate.orders import in_flight_limits


def fit_to_memory(workload: Workload, plan: Plan) -> Plan | None:
    """The plan with D, the micro-batches that fit into memory, as a limit for each stage.

    Returns the plan unchanged if it fits without limits, and None if a stage cannot hold one
    micro-batch or its policy allows no limit.
    """
    if may_fit(workload, plan):
        return plan
    if plan.interleaved or plan.policy == "gpipe" or len(plan.stages) == 1:
        return None
    limits = []
    policy_limits = in_flight_limits(plan, workload.micro_batches)
    for stage, policy_limit in zip(plan.stages, policy_limits, strict=True):
        memory = min(workload.cluster.memory[g] for g in stage.gpus)
        working = working_bytes(workload, stage, plan.recompute, False)
        free = memory - state_bytes(workload, stage) - working
        held = held_bytes(workload, stage, plan.recompute, False)
        room = policy_limit if held <= 0 else math.floor(free / held)
        if free < 0 or room < 1:
            return None
        limits.append(min(policy_limit, room))
    limited = replace(plan, in_flight=tuple(limits))
    return limited if may_fit(workload, limited) else None
