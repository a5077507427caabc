"""DAPPLE's published rows by its own formula, among plans of the shapes that the paper prints.

Every plan of tables 4 and 6 is pure data parallelism, two stages, or one GPU a stage ("straight").
Here those three are ranked by the closed form L (equations 1 and 2), as the paper's planner ranks,
with our constants.  That its search went no further is our reading: the paper does not say so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.closed_form import closed_form
from nostall.parallel.simulate import simulated_s


def one_pass(work: Workload) -> Workload:
    """The same batch with a replica's whole share as its micro-batch, which is what data
    parallelism without accumulation computes; its all-reduce then hides behind all of it."""
    return replace(work, micro_batch=-(-work.global_batch // len(work.cluster)))


def data_parallel(work: Workload) -> Plan:
    return Plan((Stage(0, len(work.profile), tuple(range(len(work.cluster)))),), "pb")


def formula_s(work: Workload, plan: Plan) -> float:
    """L; for data parallelism, of which L does not speak, what the simulator says of one pass."""
    if len(plan.stages) == 1:
        return simulated_s(one_pass(work), plan)
    return closed_form(work, plan).total_s


def best_by_formula(work: Workload) -> Plan:
    """Least L of the three shapes; GPUs in the order of their servers."""
    shapes = [data_parallel(work), *_two_stages(work), _straight(work)]
    return min(shapes, key=lambda plan: formula_s(work, plan))


def _two_stages(work: Workload) -> Iterable[Plan]:
    layers, gpus = len(work.profile), tuple(range(len(work.cluster)))
    for cut, first in itertools.product(range(1, layers), range(1, len(gpus))):
        stages = (Stage(0, cut, gpus[:first]), Stage(cut, layers, gpus[first:]))
        yield Plan(stages, "pb")


def _straight(work: Workload) -> Plan:
    """Even cuts, then moved while L gets less."""
    layers, stages = len(work.profile), len(work.cluster)
    time = [f + b for f, b in zip(work.forward_s, work.backward_s, strict=True)]
    ends = [0]
    for s in range(1, stages):
        even = min(range(layers + 1), key=lambda j, s=s: abs(time[j] - s / stages * time[-1]))
        ends.append(min(max(even, ends[-1] + 1), layers - (stages - s)))
    return _climbed(work, [*ends[1:], layers])


def _climbed(work: Workload, ends: list[int]) -> Plan:
    best = _cut(ends)
    better = True
    while better:
        better = False
        for i, step in itertools.product(range(len(ends) - 1), (-3, -2, -1, 1, 2, 3)):
            new = [*ends[:i], ends[i] + step, *ends[i + 1 :]]
            if (new[i - 1] if i else 0) < new[i] < new[i + 1]:
                plan = _cut(new)
                if formula_s(work, plan) < formula_s(work, best):
                    best, ends, better = plan, new, True
    return best


def _cut(ends: list[int]) -> Plan:
    firsts = [0, *ends[:-1]]
    return Plan(
        tuple(Stage(a, b, (g,)) for g, (a, b) in enumerate(zip(firsts, ends, strict=True))), "pb"
    )
