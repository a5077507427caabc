"""How plans are found: the published explorer, a greedy baseline, a proven optimum, and a space."""

from nostall.fusion.explore.explorer import Explored, explore, refined
from nostall.fusion.explore.greedy import greedy
from nostall.fusion.explore.programme import Optimum, optimum
from nostall.fusion.explore.space import PlanSpace

__all__ = ["Explored", "Optimum", "PlanSpace", "explore", "greedy", "optimum", "refined"]
