"""Planner of the DAPPLE paper: its closed-form latency L, over the plan shapes in its tables.

Every plan in tables 4 and 6 is pure data parallelism, has two stages, or has one GPU per stage
("straight").  These three shapes are ranked by the closed form L (equations 1 and 2) with the
constants of nostall.  That the paper's planner searched no further shapes is an assumption.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.closed_form import closed_form
from nostall.parallel.simulate import simulated_s


def one_pass(work: Workload) -> Workload:
    """The workload with one micro-batch per replica: data parallelism without accumulation.

    The all-reduce can then overlap with the whole backward pass.
    """
    return replace(work, micro_batch=-(-work.global_batch // len(work.cluster)))


def data_parallel(work: Workload) -> Plan:
    return Plan((Stage(0, len(work.profile), tuple(range(len(work.cluster)))),), "pb")


def formula_s(work: Workload, plan: Plan) -> float:
    """L of a pipeline plan; the simulated time of one pass for data parallelism, which L omits."""
    if len(plan.stages) == 1:
        return simulated_s(one_pass(work), plan)
    return closed_form(work, plan).total_s


def best_by_formula(work: Workload) -> Plan:
    """The plan with the smallest L among the three shapes; GPUs are in server order."""
    shapes = [data_parallel(work), *_two_stages(work), _straight(work)]
    return min(shapes, key=lambda plan: formula_s(work, plan))


def _two_stages(work: Workload) -> Iterable[Plan]:
    layers, gpus = len(work.profile), tuple(range(len(work.cluster)))
    for cut, first in itertools.product(range(1, layers), range(1, len(gpus))):
        stages = (Stage(0, cut, gpus[:first]), Stage(cut, layers, gpus[first:]))
        yield Plan(stages, "pb")


def _straight(work: Workload) -> Plan:
    """One GPU per stage: even cuts, then a local search that reduces L."""
    layers, stages = len(work.profile), len(work.cluster)
    time = [f + b for f, b in zip(work.forward_s, work.backward_s, strict=True)]
    ends = [0]
    for s in range(1, stages):
        even = min(range(layers + 1), key=lambda j, s=s: abs(time[j] - s / stages * time[-1]))
        ends.append(min(max(even, ends[-1] + 1), layers - (stages - s)))
    return _local_search(work, [*ends[1:], layers])


def _local_search(work: Workload, ends: list[int]) -> Plan:
    best = _straight_plan(ends)
    improved = True
    while improved:
        improved = False
        for i, step in itertools.product(range(len(ends) - 1), (-3, -2, -1, 1, 2, 3)):
            moved = [*ends[:i], ends[i] + step, *ends[i + 1 :]]
            if (moved[i - 1] if i else 0) < moved[i] < moved[i + 1]:
                plan = _straight_plan(moved)
                if formula_s(work, plan) < formula_s(work, best):
                    best, ends, improved = plan, moved, True
    return best


def _straight_plan(ends: list[int]) -> Plan:
    starts = [0, *ends[:-1]]
    bounds = enumerate(zip(starts, ends, strict=True))
    return Plan(tuple(Stage(start, end, (gpu,)) for gpu, (start, end) in bounds), "pb")
