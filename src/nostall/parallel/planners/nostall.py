"""nostall's own planner: the best published plan, then a search over cuts, mapping and order.

The cheap plans (:mod:`.fastest`) are candidates, and every other planner's plan: as it is, in every
order, and with a split backward pass.  The result is therefore never worse, in modelled time, than
any of these plans.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from nostall.core import Budget, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.baselines import (
    data_parallel,
    even,
    gpipe,
    pipedream,
)
from nostall.parallel.planners.cut_positions import balanced_cuts, straight_stages
from nostall.parallel.planners.dapple import dapple
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fastest import simulated_cheap_plans
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.planners.plan_space import ORDERS, PlanSpace
from nostall.parallel.planners.spp import partitions, spp
from nostall.parallel.simulate import simulated_s
from nostall.search import Anneal

EVALUATIONS = 4800
"""Simulated plans of the search if the time limit allows: half for simulated annealing, half for
the best-first search after it."""
MAX_EXPANDED = 60
"""Plans that the best-first search expands."""
ANNEALING_STARTS = 3
"""Best candidates with different stages from which simulated annealing starts."""


class SimulatedTime(Objective[Plan]):
    """Modelled iteration time of the event simulator, in seconds."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def evaluate(self, states: Sequence[Plan]) -> list[Measurement]:
        return [
            Measurement(self.unit, (simulated_s(self.workload, plan),), self.kind)
            for plan in states
        ]


def nostall(workload: Workload, effort: Effort) -> Plan:
    """The plan with the least modelled time of all candidates and of two searches from the best.

    Raises :class:`Infeasible` if no planner has a plan that fits into memory.
    """
    cheap = dict(simulated_cheap_plans(workload, effort.recompute).values())
    plans = list(candidates(workload, effort))
    if not plans and not cheap:
        raise effort.no_plan(
            "no plan fits into memory; use more GPUs, a smaller micro-batch or a smaller "
            "--state-factor"
        )
    times = _simulate_all(workload, plans, effort, cheap)
    ranked = sorted(times.items(), key=lambda pair: pair[1])
    best, seconds = ranked[0]
    starts = [plan for plan, _ in ranked if not plan.interleaved]
    evaluations = (effort.evaluations or EVALUATIONS) // 2
    for i, start in enumerate(_with_different_stages(starts)):
        if effort.is_over:
            break
        effort.report_progress(0.6 + 0.4 * i / ANNEALING_STARTS, "nostall: searching")
        budget = Budget(
            seconds=effort.remaining_s / (ANNEALING_STARTS - i + 1),
            evaluations=max(1, evaluations // ANNEALING_STARTS),
        )
        # With a memo_size, plans that were simulated before would not count against the budget, and
        # a small space has few others.
        result = Anneal(memo_size=0).run(
            PlanSpace(workload, start), SimulatedTime(workload), budget, seed=effort.seed + i
        )
        if result.best_measurement.value < seconds:
            best, seconds = result.best, result.best_measurement.value
    return best if best.interleaved else _best_first(workload, best, seconds, evaluations, effort)


def _simulate_all(
    workload: Workload, plans: Sequence[Plan], effort: Effort, known: Mapping[Plan, float]
) -> dict[Plan, float]:
    """Modelled seconds of the plans, at the limit of those simulated so far, and ``known`` ones."""
    times: dict[Plan, float] = {}
    for plan in plans:
        if (times or known) and effort.is_over:
            break
        times[plan] = simulated_s(workload, plan)
    return times | {plan: seconds for plan, seconds in known.items() if plan not in times}


def _best_first(
    workload: Workload, start: Plan, start_s: float, evaluations: int, effort: Effort
) -> Plan:
    """The best plan of a best-first search that tries each move of a plan in every order.

    Annealing can miss improvements that need two moves and another order at once.
    """
    space = PlanSpace(workload, start)
    queue = [(start_s, 0, start)]
    seen = {start}
    best, best_s = start, start_s
    for _ in range(MAX_EXPANDED):
        if not queue or len(seen) > evaluations or effort.is_over:
            break
        _, _, plan = heapq.heappop(queue)
        for move in space.moves(plan):
            moved = space.apply(plan, move)
            neighbours = (
                [moved] if move.kind in ("order", "hold") else _in_all_orders(workload, moved)
            )
            for neighbour in neighbours:
                if neighbour in seen or len(seen) > evaluations or effort.is_over:
                    continue
                seen.add(neighbour)
                seconds = simulated_s(workload, neighbour)
                heapq.heappush(queue, (seconds, len(seen), neighbour))
                if seconds < best_s:
                    best, best_s = neighbour, seconds
    return best


def _in_all_orders(workload: Workload, plan: Plan) -> list[Plan]:
    """The plan in each order in which it fits into memory."""
    plans = (
        fit_to_memory(workload, replace(plan, policy=policy, in_flight=None)) for policy in ORDERS
    )
    return [plan for plan in plans if plan is not None]


def candidates(workload: Workload, effort: Effort) -> Iterator[Plan]:
    """Every other planner's plan and all SPP partitions, in every order that fits into memory."""
    plans: list[Plan] = []
    for planner in (spp, pipedream, even, gpipe, data_parallel, dapple):
        if plans and effort.is_over:
            break
        effort.report_progress(0.1 * len(plans), planner.__name__)
        try:
            plans.append(planner(workload, effort))
        except (BadPlan, Infeasible):
            continue  # this planner has no plan to add
    yield from plans
    for stages in () if effort.is_over else partitions(workload, effort):
        plan = fit_to_memory(workload, Plan(stages))
        if plan is None and effort.recompute:
            plan = fit_to_memory(workload, Plan(stages, recompute=True))
        plans += [plan] if plan is not None else []
    for plan in plans:
        if effort.is_over:
            return
        yield from _in_all_orders(workload, plan)
    if not effort.is_over:
        yield from _interleaved(workload)


def _interleaved(workload: Workload) -> Iterator[Plan]:
    """A plan with two stages per GPU, assigned in rotation, if the interleaved order allows it."""
    n, layers = len(workload.cluster), len(workload.profile)
    if n < 2 or layers < 2 * n or workload.micro_batches % n:
        return
    stages = straight_stages(balanced_cuts(workload, 2 * n))
    rotated = tuple(replace(stage, gpus=(i % n,)) for i, stage in enumerate(stages))
    if (plan := fit_to_memory(workload, Plan(rotated, "interleaved"))) is not None:
        yield plan


def _with_different_stages(plans: Sequence[Plan]) -> Iterator[Plan]:
    """The first ``ANNEALING_STARTS`` plans that differ in their stages."""
    seen: set[tuple[Stage, ...]] = set()
    for plan in plans:
        if plan.stages not in seen and len(seen) < ANNEALING_STARTS:
            seen.add(plan.stages)
            yield plan
