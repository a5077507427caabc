"""Choice of the plan with the least simulated time, within a planner's time limit."""

from __future__ import annotations

from collections.abc import Iterable

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.planners.effort import Effort
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
