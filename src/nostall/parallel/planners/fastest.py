"""Choice of the plan with the least simulated time, within a planner's time limit.

Planners start from the cheap plans, which take no search, so that a search that its limit ends is
never slower in modelled time than any of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.cut_positions import balanced_cuts, straight_stages
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.simulate import simulated_s


def fastest(workload: Workload, plans: Iterable[Plan], effort: Effort) -> Plan | None:
    """The first of the plans with the least simulated time; None without plans.

    At the time limit the plans that are left are not simulated.
    """
    best: tuple[float, Plan] | None = None
    for plan in plans:
        if best is not None and effort.is_over:
            break
        seconds = simulated_s(workload, plan)
        if best is None or seconds < best[0]:
            best = seconds, plan
    return None if best is None else best[1]


def cheap_plans(workload: Workload, recompute: bool) -> dict[str, Plan]:
    """Plans that need no search and fit into memory, by name.

    ``recompute``: whether a plan that does not fit otherwise may re-compute activations.
    """
    cluster, layers = workload.cluster, len(workload.profile)
    largest = max(range(len(cluster)), key=lambda gpu: cluster.memory[gpu])
    stages: dict[str, tuple[Stage, ...]] = {"one GPU": (Stage(0, layers, (largest,)),)}
    if len(cluster.servers) > 1:
        server = max(cluster.servers, key=len)
        stages["data parallelism in one server"] = (Stage(0, layers, tuple(server)),)
    if len(cluster) > 1:
        stages["data parallelism"] = (Stage(0, layers, tuple(range(len(cluster)))),)
        balanced = balanced_cuts(workload, min(layers, len(cluster)))
        stages["a balanced pipeline"] = straight_stages(balanced)
    plans = {}
    for name, own in stages.items():
        for is_recomputed in (False, True) if recompute else (False,):
            plan = fit_to_memory(workload, Plan(own, "1f1b", recompute=is_recomputed))
            if plan is not None:
                plans[name] = plan
                break
    return plans


@lru_cache(maxsize=8)
def simulated_cheap_plans(workload: Workload, recompute: bool) -> dict[str, tuple[Plan, float]]:
    """The cheap plans that fit into memory and their modelled seconds, by name; fastest first.

    ``recompute``: whether a plan that does not fit otherwise may re-compute activations.
    """
    plans = cheap_plans(workload, recompute)
    times = {name: (plan, simulated_s(workload, plan)) for name, plan in plans.items()}
    return dict(sorted(times.items(), key=lambda item: item[1][1]))


def fastest_or_cheap(workload: Workload, plan: Plan | None, effort: Effort) -> Plan | None:
    """The faster of ``plan`` and the cheap plans; ``plan`` if they are as fast.  None without any.

    The time limit does not count: there are a few cheap plans.
    """
    cheap = simulated_cheap_plans(workload, effort.recompute)
    if not cheap:
        return plan
    best, seconds = next(iter(cheap.values()))
    return best if plan is None or seconds < simulated_s(workload, plan) else plan
