"""Pipeline plans: stages, their GPUs and replication, the micro-batch order, and modelled times."""

from nostall.parallel.cluster import Cluster, load_cluster
from nostall.parallel.errors import BadCluster, BadPlan, BadProfile, Infeasible
from nostall.parallel.evaluation import PlanEvaluation, evaluate_plan
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.plan_file import load_plan, plan_document
from nostall.parallel.planners import PLANNERS, Effort, make_plan
from nostall.parallel.profile import Layer, Profile, Tensor, load_profile, save_profile
from nostall.parallel.simulate import simulate

__all__ = [
    "PLANNERS",
    "BadCluster",
    "BadPlan",
    "BadProfile",
    "Cluster",
    "Effort",
    "Infeasible",
    "Layer",
    "Plan",
    "PlanEvaluation",
    "Profile",
    "Stage",
    "Tensor",
    "Workload",
    "evaluate_plan",
    "load_cluster",
    "load_plan",
    "load_profile",
    "make_plan",
    "plan_document",
    "save_profile",
    "simulate",
]
