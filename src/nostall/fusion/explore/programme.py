"""The best plan of connected patterns, proven: the integer programme of arXiv:1911.11576.

A column is a legal pattern, its worth the delta-evaluator's gain; columns that share no operator
are chosen so that their gains add up to the most, and operators in no column stay alone.  (The
abstract says integer programming; variables and constraints are our reading.)  What makes a
solution no plan is met lazily: patterns that the code generator cannot write are struck out, each
circle of patterns that would wait for each other is forbidden, and the programme is solved again.
Before that, columns go that cannot be in a plan better than a known one
(:mod:`~nostall.fusion.explore.relaxation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import networkx
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.evaluate.legality import MOST_OPERATORS, mapping
from nostall.fusion.explore.neighbours import neighbours
from nostall.fusion.explore.relaxation import incidence, relaxed
from nostall.fusion.graph.partition import Mask, Plan, members

MOST_COLUMNS = 200_000
_MICROSECONDS = 1e6
"""The solver's tolerances are absolute; gains are a few to a few thousand of these."""


@dataclass(frozen=True, slots=True)
class Columns:
    """All legal connected patterns with a gain, whether or not the code generator can write them;
    ``complete`` says that none is missing.  ``seen`` counts the legal patterns, gain or not."""

    patterns: tuple[Mask, ...]
    gains: tuple[float, ...]
    seen: int
    complete: bool


@dataclass(frozen=True, slots=True)
class Optimum:
    """``plan`` is optimal among plans of connected patterns where ``proven``."""

    plan: Plan
    gain: float
    proven: bool
    columns: int
    rounds: int
    stopped: Literal["optimal", "too many patterns", "time"]


def columns(delta: Delta, most: int = MOST_COLUMNS) -> Columns:
    """Enumerate convex connected sets of operators, smallest first, up to ``most`` legal ones.

    Every such set of several operators has a first or last operator without which it still hangs
    together, so adding neighbours one at a time meets them all; what has no layout
    (:func:`~nostall.fusion.evaluate.legality.mapping`) has none with more operators either.
    """
    graph = delta.graph
    beside = neighbours(graph)
    layer = {1 << i: (graph.ancestors[i], graph.descendants[i], beside[i]) for i in graph.operators}
    patterns: list[Mask] = []
    gains: list[float] = []
    seen = 0
    for size in range(1, MOST_OPERATORS + 1):
        wider: dict[Mask, tuple[Mask, Mask, Mask]] = {}
        for mask, (above, below, around) in layer.items():
            gain = delta.gain(mask)
            if gain is None and mapping(delta.work, mask) is None:
                continue
            seen += gain is not None
            if gain is not None and gain > 0 and size > 1:
                patterns.append(mask)
                gains.append(gain)
            if seen > most or len(wider) > most:
                return Columns(tuple(patterns), tuple(gains), seen, False)
            for index in members(around & ~mask):
                whole = mask | 1 << index
                if whole in wider:
                    continue
                up, down = above | graph.ancestors[index], below | graph.descendants[index]
                if not up & down & ~whole:
                    wider[whole] = up, down, around | beside[index]
        if not wider:
            break
        layer = wider
    return Columns(tuple(patterns), tuple(gains), seen, True)


def optimum(
    delta: Delta, *, most: int = MOST_COLUMNS, seconds: float = 120.0, known: Plan | None = None
) -> Optimum:
    """The plan with the most gain; ``proven`` False where patterns or seconds did not suffice.

    ``known`` is any plan of connected kernels; a good one makes the proof short.
    """
    known = known or Plan.unfused(delta.graph)
    found = columns(delta, most)
    if not found.complete:
        return Optimum(known, _gain(delta, known), False, found.seen, 0, "too many patterns")
    deadline = monotonic() + seconds
    tried = _reduced(delta, found, _gain(delta, known), deadline)
    cuts: list[list[int]] = []
    rounds = 0
    while tried is not None:
        rounds += 1
        chosen = _solved(delta, tried, cuts, deadline - monotonic())
        if chosen is None:
            break
        patterns = [tried.patterns[at] for at in chosen]
        refused = [at for at in chosen if not delta.joins(tried.patterns[at])]
        if refused:
            cuts += [[at] for at in refused]
            continue
        plan = _plan(delta, patterns)
        circle = _circle(delta, plan)
        if circle is None:
            best = max(known, plan, key=lambda plan: _gain(delta, plan))
            return Optimum(best, _gain(delta, best), True, found.seen, rounds, "optimal")
        cuts.append([at for at in chosen if tried.patterns[at] in circle])
    return Optimum(known, _gain(delta, known), False, found.seen, rounds, "time")


def _gain(delta: Delta, plan: Plan) -> float:
    return sum(delta.gain(mask) or 0.0 for mask in plan.groups)


def _reduced(delta: Delta, found: Columns, known: float, deadline: float) -> Columns | None:
    """The columns that a plan can hold that gains more than is ``known``; None where time ran out.

    Columns in the linear programme's solution that cannot be written are struck out first: they
    would make its bound too high.
    """
    gains = np.array(found.gains) * _MICROSECONDS
    held = incidence(found.patterns, delta.graph.operators)
    while len(gains):
        solution = relaxed(held, gains) if monotonic() < deadline else None
        if solution is None:
            return None
        struck = [at for at in solution.support if not delta.joins(found.patterns[at])]
        if not struck:
            within = solution.bound - solution.losses >= known * _MICROSECONDS
            return _kept(found, np.flatnonzero(within))
        rest = np.setdiff1d(np.arange(len(gains)), struck)
        found, gains, held = _kept(found, rest), gains[rest], held[rest]
    return found


def _kept(found: Columns, places: Iterable[int]) -> Columns:
    """Some of the columns."""
    at = [int(place) for place in places]
    patterns = tuple(found.patterns[i] for i in at)
    return Columns(patterns, tuple(found.gains[i] for i in at), found.seen, found.complete)


def _solved(
    delta: Delta, found: Columns, cuts: Sequence[Sequence[int]], seconds: float
) -> list[int] | None:
    """The chosen columns; None where time ran out."""
    if not found.patterns:
        return []
    if seconds <= 0:
        return None
    held = incidence(found.patterns, delta.graph.operators).T
    forbidden = np.zeros((len(cuts), len(found.patterns)))
    for row, cut in enumerate(cuts):
        forbidden[row, cut] = 1
    limits = np.array([1.0] * len(held) + [len(cut) - 1.0 for cut in cuts])
    result = milp(
        -np.array(found.gains) * _MICROSECONDS,
        integrality=np.ones(len(found.patterns)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(csr_array(np.vstack([held, forbidden])), ub=limits),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.status != 0:
        return None
    return [int(at) for at in np.flatnonzero(result.x > 0.5)]


def _plan(delta: Delta, patterns: Sequence[Mask]) -> Plan:
    covered = 0
    for mask in patterns:
        covered |= mask
    alone = [1 << i for i in delta.graph.operators if not covered >> i & 1]
    return Plan.of([*patterns, *alone])


def _circle(delta: Delta, plan: Plan) -> set[Mask] | None:
    """Patterns of several operators on one circle of the contracted graph, fewest by chance."""
    graph = delta.graph
    held = {index: mask for mask in plan.groups for index in members(mask)}
    # What belongs to no kernel is its own mask too: an index could be some kernel's mask.
    place = {node.index: held.get(node.index, 1 << node.index) for node in graph}
    contracted = networkx.DiGraph()
    for node in graph:
        for user in graph.consumers[node.index]:
            if place[node.index] != place[user]:
                contracted.add_edge(place[node.index], place[user])
    try:
        edges = networkx.find_cycle(contracted)
    except networkx.NetworkXNoCycle:
        return None
    return {mask for mask, _ in edges if mask & (mask - 1)}
