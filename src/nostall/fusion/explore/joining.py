"""Joining kernels of a plan pair by pair, in the order of a score."""

from __future__ import annotations

from collections.abc import Callable

from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.explore.contraction import Contraction
from nostall.fusion.explore.neighbours import neighbours
from nostall.fusion.plan import Mask, Plan, members

Score = Callable[[Mask, Mask], float | None]
"""What joining two kernels is worth; None or nothing above 0: leave them."""


def joined(delta: Delta, plan: Plan, score: Score, rounds: int) -> Plan:
    """Rank all pairs of kernels that share data, join them in this order wherever both are still
    what they were, the kernel is legal and no circle arises; repeat until nothing changes."""
    beside = neighbours(delta.graph)
    owner = {index: mask for mask in plan.groups for index in members(mask)}
    kernels = _contraction(delta, owner)
    for _ in range(rounds):
        pairs = {
            (owner[one], owner[other])
            for one in owner
            for other in members(beside[one] & ~owner[one])
            if owner[one] < owner[other]
        }
        worth = ((score(one, other), one, other) for one, other in pairs)
        ranked = sorted((-value, one, other) for value, one, other in worth if value is not None)
        changed = False
        for value, one, other in ranked:
            if value >= 0 or owner[_first(one)] != one or owner[_first(other)] != other:
                continue
            both = one | other
            if delta.parts(both) is None:
                continue
            kernels.remove(one)
            kernels.remove(other)
            changed_here = kernels.admits(both)
            for mask in (both,) if changed_here else (one, other):
                kernels.add(mask)
            if changed_here:
                owner.update(dict.fromkeys(members(both), both))
                changed = True
        if not changed:
            break
    return Plan.of(set(owner.values()))


def _contraction(delta: Delta, owner: dict[int, Mask]) -> Contraction:
    kernels = Contraction(delta.graph)
    for mask in set(owner.values()):
        kernels.add(mask)
    return kernels


def _first(mask: Mask) -> int:
    return (mask & -mask).bit_length() - 1
