"""The analytical model of arXiv:1910.05930: step time, projection, sensitivity, populations.

As published, the time of a step is the sum of input, compute, memory access and weight traffic.
Each is an amount over 70 % of a peak rate, and nothing overlaps.  nostall adds closed forms of the
weight traffic, efficiencies that depend on size, a bound for perfect overlap and weighted
populations.  All results are modelled.
"""

from nostall.workload.model.population import Projection

__all__ = ["Projection"]
