"""Pipeline plans: where to cut a model, where each part runs, how often, and in which order."""

from nostall.parallel.cluster import Cluster, load_cluster
from nostall.parallel.errors import BadCluster, BadPlan, BadProfile, Infeasible
from nostall.parallel.files import load_plan, plan_document
from nostall.parallel.outcome import Outcome, outcome
from nostall.parallel.plan import Plan, Stage, Workload
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
    "Outcome",
    "Plan",
    "Profile",
    "Stage",
    "Tensor",
    "Workload",
    "load_cluster",
    "load_plan",
    "load_profile",
    "make_plan",
    "outcome",
    "plan_document",
    "save_profile",
    "simulate",
]
