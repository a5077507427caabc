"""The best plan of connected patterns, proven: the integer programme of arXiv:1911.11576.

A column is a legal pattern, its worth the delta-evaluator's gain; columns that share no operator
are chosen so that their gains add up to the most, and operators in no column stay alone.  (The
abstract says integer programming; variables and constraints are our reading.)  Patterns that would
wait for each other in a circle are met lazily: each circle that a solution contains is forbidden,
and the programme is solved again.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from nostall.fusion.plan import Mask, Plan, members

MOST_COLUMNS = 200_000
_MICROSECONDS = 1e6
"""The solver's tolerances are absolute; gains are a few to a few thousand of these."""


@dataclass(frozen=True, slots=True)
class Columns:
    """All legal connected patterns with a gain; ``complete`` says that none is missing.  ``seen``
    counts the legal patterns, gain or not."""

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
    layer = {1 << i: (graph.ancestors[i], graph.descendants[i]) for i in graph.operators}
    patterns: list[Mask] = []
    gains: list[float] = []
    seen = 0
    for size in range(1, MOST_OPERATORS + 1):
        wider: dict[Mask, tuple[Mask, Mask]] = {}
        for mask, (above, below) in layer.items():
            gain = delta.gain(mask)
            if gain is None and mapping(delta.work, mask) is None:
                continue
            seen += gain is not None
            if gain is not None and gain > 0 and size > 1 and delta.joins(mask):
                patterns.append(mask)
                gains.append(gain)
            if seen > most or len(wider) > most:
                return Columns(tuple(patterns), tuple(gains), seen, False)
            around = 0
            for index in members(mask):
                around |= beside[index]
            for index in members(around & ~mask):
                whole = mask | 1 << index
                if whole in wider:
                    continue
                up, down = above | graph.ancestors[index], below | graph.descendants[index]
                if not up & down & ~whole:
                    wider[whole] = up, down
        if not wider:
            break
        layer = wider
    return Columns(tuple(patterns), tuple(gains), seen, True)


def optimum(delta: Delta, *, most: int = MOST_COLUMNS, seconds: float = 120.0) -> Optimum:
    """The plan with the most gain; ``proven`` False where patterns or seconds did not suffice."""
    found = columns(delta, most)
    if not found.complete:
        return Optimum(Plan.unfused(delta.graph), 0.0, False, found.seen, 0, "too many patterns")
    deadline = monotonic() + seconds
    cuts: list[list[int]] = []
    while True:
        chosen = _solved(delta, found, cuts, deadline - monotonic())
        rounds = len(cuts) + 1
        if chosen is None:
            return Optimum(Plan.unfused(delta.graph), 0.0, False, found.seen, rounds, "time")
        plan = _plan(delta, [found.patterns[at] for at in chosen])
        circle = _circle(delta, plan)
        if circle is None:
            gain = sum(found.gains[at] for at in chosen)
            return Optimum(plan, gain, True, found.seen, rounds, "optimal")
        cuts.append([at for at in chosen if found.patterns[at] in circle])


def _solved(
    delta: Delta, found: Columns, cuts: Sequence[Sequence[int]], seconds: float
) -> list[int] | None:
    """The chosen columns; None where time ran out."""
    if not found.patterns:
        return []
    if seconds <= 0:
        return None
    row = {index: at for at, index in enumerate(delta.graph.operators)}
    pairs = [(row[i], at) for at, mask in enumerate(found.patterns) for i in members(mask)]
    pairs += [(len(row) + at, column) for at, cut in enumerate(cuts) for column in cut]
    rows, places = np.array(pairs).T
    shape = (len(row) + len(cuts), len(found.patterns))
    matrix = csr_array((np.ones(len(pairs)), (rows, places)), shape=shape)
    limits = np.array([1.0] * len(row) + [len(cut) - 1.0 for cut in cuts])
    result = milp(
        -np.array(found.gains) * _MICROSECONDS,
        integrality=np.ones(len(found.patterns)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, ub=limits),
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
