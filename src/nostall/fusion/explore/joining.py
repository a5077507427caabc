"""Joining kernels of a plan pair by pair, in the order of a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.explore.contraction import Contraction
from nostall.fusion.explore.neighbours import neighbours
from nostall.fusion.graph.partition import Mask, Plan, members

Score = Callable[[Mask, Mask], float | None]
"""What joining two kernels is worth; None or nothing above 0: leave them."""


def joined(delta: Delta, plan: Plan, score: Score, rounds: int) -> Plan:
    """Rank all pairs of kernels that share data, join them in this order wherever both are still
    what they were, the kernel is legal and no circle arises; repeat until nothing changes."""
    beside = neighbours(delta.graph)
    owner = {index: mask for mask in plan.groups for index in members(mask)}
    kernels = Contraction(delta.graph)
    for mask in plan.groups:
        kernels.add(mask)
    for _ in range(rounds):
        changed = False
        for one, other in _ranked(owner, beside, score):
            if owner[_first(one)] != one or owner[_first(other)] != other:
                continue
            if delta.joins(one | other) and _joins(kernels, one, other):
                owner.update(dict.fromkeys(members(one | other), one | other))
                changed = True
        if not changed:
            break
    return Plan.of(set(owner.values()))


def _ranked(
    owner: Mapping[int, Mask], beside: Mapping[int, Mask], score: Score
) -> list[tuple[Mask, Mask]]:
    """Pairs of kernels that share data and are worth joining, best first."""
    pairs = {
        (owner[one], owner[other])
        for one in owner
        for other in members(beside[one] & ~owner[one])
        if owner[one] < owner[other]
    }
    worth = ((score(one, other), one, other) for one, other in pairs)
    ranked = sorted((-value, one, other) for value, one, other in worth if value and value > 0)
    return [(one, other) for _, one, other in ranked]


def _joins(kernels: Contraction, one: Mask, other: Mask) -> bool:
    """Join two kernels unless the rest then waits in a circle."""
    kernels.remove(one)
    kernels.remove(other)
    free = kernels.admits(one | other)
    for mask in (one | other,) if free else (one, other):
        kernels.add(mask)
    return free


def _first(mask: Mask) -> int:
    return (mask & -mask).bit_length() - 1
