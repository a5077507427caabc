"""The analytical framework of arXiv:1910.05930 and the questions it answers.

Published: a step's time is input + compute + memory + weight traffic, each an amount over 70 % of
a peak, without overlap.  Ours: closed forms of the traffic, efficiencies that depend on size, the
bound with perfect overlap, weighted populations.  Every number here is *modelled*.
"""

from nostall.workload.model.breakdown import PARTS, Breakdown, step
from nostall.workload.model.population import Population, Series
from nostall.workload.model.projection import Projection, project
from nostall.workload.model.roofline import Placement, place
from nostall.workload.model.sweep import Sensitivity, Sweep, sensitivities, sweep
from nostall.workload.model.traffic import traffic

__all__ = [
    "PARTS",
    "Breakdown",
    "Placement",
    "Population",
    "Projection",
    "Sensitivity",
    "Series",
    "Sweep",
    "place",
    "project",
    "sensitivities",
    "step",
    "sweep",
    "traffic",
]
