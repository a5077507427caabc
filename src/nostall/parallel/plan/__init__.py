"""Pipeline plans (stages, GPUs, micro-batch order) and the workloads that they are made for."""

from nostall.parallel.plan.plan import POLICIES, Plan, Policy, Stage, check_plan
from nostall.parallel.plan.workload import Workload

__all__ = ["POLICIES", "Plan", "Policy", "Stage", "Workload", "check_plan"]
