"""Explorers: FusionStitching's search for a partition, a greedy baseline, and annealing.

The proven optimum is in :mod:`nostall.fusion.explore.integer_program`, which needs SciPy (extra
``fusion``).
"""

from nostall.fusion.explore.explorer import ExplorationResult, explore, refine
from nostall.fusion.explore.joining import greedy_partition
from nostall.fusion.explore.space import PartitionSpace

__all__ = ["ExplorationResult", "PartitionSpace", "explore", "greedy_partition", "refine"]
