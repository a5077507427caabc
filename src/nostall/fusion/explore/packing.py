"""Remote fusion: kernels that exchange no data become one launch (arXiv:2009.10924).

Kernels of equal depth in the contracted graph never wait for each other, and every edge leads to a
greater depth, so whatever is packed inside one depth leaves the plan acyclic.
"""

from __future__ import annotations

from collections import defaultdict

from nostall.fusion.errors import BadFusion
from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.graph.partition import Mask, Plan


def packed(delta: Delta, plan: Plan) -> Plan:
    """The plan with kernels of equal depth packed first-fit where the evaluator sees a gain."""
    groups = []
    for together in _by_depth(delta, plan).values():
        packs: list[Mask] = []
        for mask in together:
            for at, pack in enumerate(packs):
                if _pays(delta, pack, mask):
                    packs[at] = pack | mask
                    break
            else:
                packs.append(mask)
        groups += packs
    return Plan.of(groups)


def _pays(delta: Delta, one: Mask, other: Mask) -> bool:
    both = delta.gain(one | other)
    if both is None:
        return False
    apart = (delta.gain(one) or 0.0) + (delta.gain(other) or 0.0)
    return both > apart and delta.joins(one | other)


def _by_depth(delta: Delta, plan: Plan) -> dict[int, list[Mask]]:
    """Kernels by the most kernels and opaque nodes that stand one behind the other above them."""
    graph = delta.graph
    borders = [(node.index,) for node in graph if node.kind == "opaque"]
    steps = [*plan.kernels, *borders]
    order = graph.order(steps)
    if order is None:
        raise BadFusion("kernels of the plan wait for each other in a circle; check() it first")
    depth: dict[int, int] = {}
    found: defaultdict[int, list[Mask]] = defaultdict(list)
    for at in order:
        inside = set(steps[at])
        above = {source for index in steps[at] for source in graph.sources[index]} - inside
        level = 1 + max((depth.get(source, 0) for source in above), default=0)
        depth.update(dict.fromkeys(steps[at], level))
        if at < len(plan):
            found[level].append(plan.groups[at])
    return found
