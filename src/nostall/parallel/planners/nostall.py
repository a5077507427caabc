"""nostall's own planner: the best of the published ones, then a joint search of cuts, mapping and
order against the event simulator.

Every other planner's plan is a candidate as it is, in every order and with its backward pass split
in two, so the result is never worse, in modelled time, than any of theirs.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from nostall.core import Budget, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.baselines import (
    balanced_cuts,
    data_parallel,
    even,
    gpipe,
    pipedream,
    straight,
)
from nostall.parallel.planners.dapple import dapple
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fitting import fitted
from nostall.parallel.planners.neighbourhood import ORDERS, PlanSpace
from nostall.parallel.planners.spp import partitions, spp
from nostall.parallel.simulate import simulated_s
from nostall.search import Anneal

EVALUATIONS = 4800
"""Simulated plans of the search, where time allows: half for annealing, half for what follows."""
MOST_EXPANDED = 60
"""Plans whose moves are all tried behind the annealing."""
STARTS = 3
"""Different best candidates that the search sets out from."""


class SimulatedTime(Objective[Plan]):
    """The event simulator's iteration time, modelled, in seconds."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, work: Workload) -> None:
        self.work = work

    def evaluate(self, states: Sequence[Plan]) -> list[Measurement]:
        return [
            Measurement(self.unit, (simulated_s(self.work, plan),), self.kind) for plan in states
        ]


def nostall(work: Workload, effort: Effort) -> Plan:
    """The best plan found; never worse in modelled time than any other planner's.

    Raises :class:`Infeasible` when no planner has a plan that fits into memory.
    """
    plans = list(candidates(work, effort))
    if not plans:
        raise Infeasible(
            "no plan fits into memory; use more GPUs, a smaller micro-batch or a smaller "
            "--state-factor"
        )
    ranked = sorted({plan: simulated_s(work, plan) for plan in plans}.items(), key=lambda p: p[1])
    best, seconds = ranked[0]
    starts = [plan for plan, _ in ranked if not plan.interleaved]
    evaluations = (effort.evaluations or EVALUATIONS) // 2
    for done, start in enumerate(_different(starts)):
        if effort.over:
            break
        effort.tell(0.6 + 0.4 * done / STARTS, "nostall: searching")
        budget = Budget(
            seconds=effort.left / (STARTS - done + 1),
            evaluations=max(1, evaluations // STARTS),
        )
        # No memory: small spaces run out of new plans, and remembered ones are not charged.
        found = Anneal(memo_size=0).run(
            PlanSpace(work, start), SimulatedTime(work), budget, seed=effort.seed + done
        )
        if found.best_measurement.value < seconds:
            best, seconds = found.best, found.best_measurement.value
    return best if best.interleaved else _best_first(work, best, seconds, evaluations, effort)


def _best_first(
    work: Workload, plan: Plan, seconds: float, evaluations: int, effort: Effort
) -> Plan:
    """The best plan found by trying all moves, each in every order, from the best plans first.

    Annealing can miss what takes two moves and another order at once.
    """
    space = PlanSpace(work, plan)
    waiting = [(seconds, 0, plan)]
    seen = {plan}
    best = plan
    for _ in range(MOST_EXPANDED):
        if not waiting or len(seen) > evaluations or effort.over:
            break
        _, _, state = heapq.heappop(waiting)
        for move in space.moves(state):
            moved = space.apply(state, move)
            kept = [moved] if move.kind in ("order", "hold") else _in_all_orders(work, moved)
            for other in kept:
                if other in seen or len(seen) > evaluations or effort.over:
                    continue
                seen.add(other)
                found = simulated_s(work, other)
                heapq.heappush(waiting, (found, len(seen), other))
                if found < seconds:
                    best, seconds = other, found
    return best


def _in_all_orders(work: Workload, plan: Plan) -> list[Plan]:
    """The plan's stages in each order that fits."""
    plans = (fitted(work, replace(plan, policy=policy, in_flight=None)) for policy in ORDERS)
    return [plan for plan in plans if plan is not None]


def candidates(work: Workload, effort: Effort) -> Iterator[Plan]:
    """Every other planner's plan, first as it is, then in every order that fits."""
    found: list[Plan] = []
    for planner in (spp, pipedream, even, gpipe, data_parallel, dapple):
        effort.tell(0.1 * len(found), planner.__name__)
        try:
            found.append(planner(work, effort))
        except (BadPlan, Infeasible):
            continue  # a planner without a plan has nothing to add
    yield from found
    for stages in partitions(work):
        kept = fitted(work, Plan(stages))
        if kept is None and effort.recompute:
            kept = fitted(work, Plan(stages, recompute=True))
        found += [kept] if kept is not None else []
    for plan in found:
        if effort.over:
            return
        for policy in ORDERS:
            other = fitted(work, replace(plan, policy=policy, in_flight=None))
            if other is not None:
                yield other
    yield from _interleaved(work)


def _interleaved(work: Workload) -> Iterator[Plan]:
    """Two stages a GPU, dealt out in turn, where the order exists."""
    n, layers = len(work.cluster), len(work.profile)
    if n < 2 or layers < 2 * n or work.micro_batches % n:
        return
    stages = straight(balanced_cuts(work, 2 * n))
    dealt = tuple(replace(stage, gpus=(i % n,)) for i, stage in enumerate(stages))
    if (plan := fitted(work, Plan(dealt, "interleaved"))) is not None:
        yield plan


def _different(plans: Sequence[Plan]) -> Iterator[Plan]:
    """Up to ``STARTS`` plans that differ in their stages."""
    seen: set[tuple[Stage, ...]] = set()
    for plan in plans:
        if plan.stages not in seen and len(seen) < STARTS:
            seen.add(plan.stages)
            yield plan
