"""Simulator of pipeline plans: modelled time of an iteration, its bounds, costs and memory."""

from nostall.parallel.simulate.costs import Costs, costs, critical_path_s, load_bound_s
from nostall.parallel.simulate.memory import Memory, memory
from nostall.parallel.simulate.timeline import Timeline, simulate, simulated_s

__all__ = [
    "Costs",
    "Memory",
    "Timeline",
    "costs",
    "critical_path_s",
    "load_bound_s",
    "memory",
    "simulate",
    "simulated_s",
]
