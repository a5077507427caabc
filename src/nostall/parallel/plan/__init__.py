"""A plan: which layers run where, how often replicated, in which order."""

from nostall.parallel.plan.plan import POLICIES, Plan, Policy, Stage, check_plan
from nostall.parallel.plan.workload import Workload

__all__ = ["POLICIES", "Plan", "Policy", "Stage", "Workload", "check_plan"]
