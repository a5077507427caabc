"""Every plan of a small instance: the optimum that planners are measured against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fitting import fitted
from nostall.parallel.simulate import simulated_s

ORDERS: tuple[Policy, ...] = ("gpipe", "pa", "pb", "list", "zero-bubble")
"""The action set's orders for plans with one stage a GPU (1F1B is PA without memory limits)."""
MOST_PLANS = 200_000


def exhaustive(work: Workload, effort: Effort) -> Plan:
    """The best of all cuts, mappings and orders; only for small cases.

    Raises :class:`BadPlan` when there are too many plans and :class:`Infeasible` when none fits.
    """
    count = plans_of(len(work.profile), len(work.cluster)) * len(ORDERS)
    if count > MOST_PLANS:
        raise BadPlan(
            f"there are {count:.3g} plans for {len(work.profile)} layers on {len(work.cluster)} "
            f"GPUs; allowed are {MOST_PLANS}; use another planner"
        )
    best: tuple[float, Plan] | None = None
    for recompute in (False, True) if effort.recompute else (False,):
        for done, stages in enumerate(mappings(len(work.profile), len(work.cluster))):
            if done % 256 == 0:
                effort.tell(done * len(ORDERS) / count, "exhaustive")
            for policy in ORDERS if len(stages) > 1 else ORDERS[:1]:
                plan = fitted(work, Plan(stages, policy, recompute=recompute))
                if plan is not None:
                    seconds = simulated_s(work, plan)
                    if best is None or seconds < best[0]:
                        best = seconds, plan
        if best is not None:
            return best[1]
    raise Infeasible("no plan at all fits into memory; use more GPUs or a smaller micro-batch")


def mappings(layers: int, gpus: int) -> Iterator[tuple[Stage, ...]]:
    """Every sequence of stages: all cuts with all disjoint sets of GPUs."""
    for stages in range(1, min(layers, gpus) + 1):
        groups = list(_groups(tuple(range(gpus)), stages))
        for inner in itertools.combinations(range(1, layers), stages - 1):
            cuts = (0, *inner, layers)
            for group in groups:
                yield tuple(Stage(a, b, g) for a, b, g in zip(cuts, cuts[1:], group, strict=False))


def plans_of(layers: int, gpus: int) -> int:
    """How many :func:`mappings` there are."""
    return sum(
        math.comb(layers - 1, s - 1)
        * sum((-1) ** k * math.comb(s, k) * (s - k + 1) ** gpus for k in range(s + 1))
        for s in range(1, min(layers, gpus) + 1)
    )


def _groups(gpus: tuple[int, ...], stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Ordered disjoint nonempty groups, not all GPUs need be used."""
    for owner in itertools.product(range(stages + 1), repeat=len(gpus)):
        groups = tuple(
            tuple(g for g, o in zip(gpus, owner, strict=True) if o == s) for s in range(stages)
        )
        if all(groups):
            yield groups
