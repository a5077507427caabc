"""Plan files of any kind, told apart by the keys of their versions."""

from __future__ import annotations

from pathlib import Path

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.plan_file import load_plan
from nostall.parallel.sharding.engine_file import EngineFile, is_engine_plan, load_engine_plan
from nostall.parallel.sharding.hybrid.plan_file import HybridFile, is_hybrid_plan, load_hybrid_plan
from nostall.parallel.sharding.plan_file import PlanFile, is_sharding_plan, load_sharding_plan

AnyPlan = PlanFile | HybridFile | EngineFile | tuple[Workload, Plan, str]
"""What the readers of plan files return; the last one is a pipeline plan."""


def load_any_plan(path: Path) -> AnyPlan:
    """Read a plan file of any kind; raises :class:`BadPlan` if it is none, or invalid."""
    if is_sharding_plan(path):
        return load_sharding_plan(path)
    if is_engine_plan(path):
        return load_engine_plan(path)
    return load_hybrid_plan(path) if is_hybrid_plan(path) else load_plan(path)
