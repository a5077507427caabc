"""The analytical model of arXiv:1910.05930: step time, projection, sensitivity, populations.

As published, the time of a step is the sum of input, compute, memory access and weight traffic.
Each is an amount over 70 % of a peak rate, and nothing overlaps.  nostall adds closed forms of the
weight traffic, efficiencies that depend on size, a bound for perfect overlap and weighted
populations.  All results are modelled.
"""

from nostall.workload.model.breakdown import STEP_PARTS, StepBreakdown, model_step
from nostall.workload.model.population import Population, WeightedDistribution
from nostall.workload.model.projection import Projection, project_job
from nostall.workload.model.roofline import RooflinePoint, roofline_point
from nostall.workload.model.sensitivity import RateSweep, Sensitivity, sensitivities, sweep_rate
from nostall.workload.model.traffic import traffic_by_medium

__all__ = [
    "STEP_PARTS",
    "Population",
    "Projection",
    "RateSweep",
    "RooflinePoint",
    "Sensitivity",
    "StepBreakdown",
    "WeightedDistribution",
    "model_step",
    "project_job",
    "roofline_point",
    "sensitivities",
    "sweep_rate",
    "traffic_by_medium",
]
