"""Plans: stages or placements, modelled times, and training by a plan in the user's own loop.

``build``, ``Trainer`` and ``latest_checkpoint`` need PyTorch, which is loaded when they are asked
for.
"""

from typing import TYPE_CHECKING

from nostall.core.lazy_exports import lazy_exports
from nostall.parallel.cluster import Cluster, load_cluster
from nostall.parallel.errors import BadCheckpoint, BadCluster, BadPlan, BadProfile, Infeasible
from nostall.parallel.evaluation import PlanEvaluation, evaluate_plan
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.plan_file import load_plan, plan_document
from nostall.parallel.planners import PLANNERS, Effort, make_plan
from nostall.parallel.profile import Layer, Profile, Tensor, load_profile, save_profile
from nostall.parallel.simulate import simulate

if TYPE_CHECKING:
    from nostall.parallel.execute.trainer.build import build
    from nostall.parallel.execute.trainer.checkpoints import latest_checkpoint
    from nostall.parallel.execute.trainer.trainer import Trainer

__all__ = [
    "PLANNERS",
    "BadCheckpoint",
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
    "Trainer",
    "Workload",
    "build",
    "evaluate_plan",
    "latest_checkpoint",
    "load_cluster",
    "load_plan",
    "load_profile",
    "make_plan",
    "plan_document",
    "save_profile",
    "simulate",
]


__getattr__ = lazy_exports(
    f"{__name__}.execute.trainer",
    ("Trainer", "build", "latest_checkpoint"),
    "checkpoints",
    "trainer",
    "build",
)
