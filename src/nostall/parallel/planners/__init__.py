"""Planners by name: DAPPLE, SPP, PipeDream, GPipe, simple baselines, and nostall's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from nostall.core.text.suggest import unknown
from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.planners.effort import Effort

Planner = Callable[[Workload, Effort], Plan]


def _planner(module: str, function: str) -> Planner:
    """A planner whose module is imported when it plans: names and help do not need numba."""

    def plan(workload: Workload, effort: Effort) -> Plan:
        planner: Planner = getattr(import_module(f"{__name__}.{module}"), function)
        return planner(workload, effort)

    return plan


PLANNERS: dict[str, Planner] = {
    "nostall": _planner("nostall", "nostall"),
    "dapple": _planner("dapple", "dapple"),
    "spp": _planner("spp", "spp"),
    "pipedream": _planner("baselines", "pipedream"),
    "gpipe": _planner("baselines", "gpipe"),
    "even": _planner("baselines", "even"),
    "data-parallel": _planner("baselines", "data_parallel"),
    "exhaustive": _planner("baselines", "exhaustive"),
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


__all__ = ["PLANNERS", "Effort", "Planner", "make_plan"]
