"""Planners by name: DAPPLE, SPP, PipeDream, GPipe, simple baselines, and nostall's own."""

from __future__ import annotations

from collections.abc import Callable

from nostall.core.text.suggest import unknown
from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.planners.baselines import data_parallel, even, gpipe, pipedream
from nostall.parallel.planners.closed_form import Latency, closed_form
from nostall.parallel.planners.dapple import dapple
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.exhaustive import exhaustive
from nostall.parallel.planners.nostall import nostall
from nostall.parallel.planners.spp import spp

Planner = Callable[[Workload, Effort], Plan]
PLANNERS: dict[str, Planner] = {
    "nostall": nostall,
    "dapple": dapple,
    "spp": spp,
    "pipedream": pipedream,
    "gpipe": gpipe,
    "even": even,
    "data-parallel": data_parallel,
    "exhaustive": exhaustive,
}
"""Planners by name."""


def make_plan(workload: Workload, planner: str = "nostall", effort: Effort | None = None) -> Plan:
    """Plan a workload with the named planner; ``effort`` defaults to one for the workload's size.

    Raises :class:`BadPlan` if the name is unknown or the planner has no plan for these numbers of
    layers and GPUs, and :class:`Infeasible` if none of its plans fits into memory.
    """
    if planner not in PLANNERS:
        raise BadPlan(unknown("planner", planner, PLANNERS))
    return PLANNERS[planner](workload, effort or Effort.for_workload(workload))


__all__ = [
    "PLANNERS",
    "Effort",
    "Latency",
    "Planner",
    "closed_form",
    "make_plan",
]
