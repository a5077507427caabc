"""How plans are found: the published explorer, a greedy baseline, and plans as a search space.

The proven optimum is in :mod:`nostall.fusion.explore.programme`, which needs SciPy (extra fusion).
"""

from nostall.fusion.explore.explorer import Explored, explore, refined
from nostall.fusion.explore.greedy import greedy
from nostall.fusion.explore.space import PlanSpace

__all__ = ["Explored", "PlanSpace", "explore", "greedy", "refined"]
