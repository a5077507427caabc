"""The optimal partition into connected patterns, by the integer program of arXiv:1911.11576.

A column is a legal pattern, and its value is the delta-evaluator's gain. The program selects
columns without common operators that have the largest total gain; operators in no selected column
stay single. (The paper's abstract says integer programming; variables and constraints are our
reading.) A solution can still be no valid partition, which is handled lazily: patterns that the
code generator does not support are removed, each cycle of patterns is forbidden, and the program is
solved again. Before that, columns are removed that no partition better than a known one can contain
(:mod:`~nostall.fusion.explore.integer_program`).

Linear relaxation of the integer program: an upper bound and the reduced cost of each column.

The program has hundreds of thousands of columns and a few dozen rows (operators), so it is solved
by column generation: over a few columns first, then with those that have a positive gain at the
current dual prices, until no column has one. At the final prices, a column's *loss* is how much its
price exceeds its gain (its negated reduced cost). A partition that contains the column gains at
least that much less than the bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Literal

import networkx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.evaluate.legality import MAX_OPERATORS, row_layout
from nostall.fusion.explore.joining import neighbours
from nostall.fusion.graph.partition import Mask, Partition, members

_COLUMNS_PER_ROUND = 200
_TOLERANCE = 1e-7
"""Values below this share of the largest gain count as 0."""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Solution of the linear program."""

    bound: float
    """Upper bound on the gain of any partition."""
    losses: NDArray[np.float64]
    """For each column: how much less than the bound a partition with it gains, at least."""
    support: tuple[int, ...]
    """Columns with a positive share in the solution."""


def incidence(patterns: Sequence[Mask], operators: Sequence[int]) -> NDArray[np.uint8]:
    """Matrix of patterns by operators: 1 if the pattern contains the operator."""
    width = operators[-1] // 8 + 1 if operators else 1
    raw = b"".join(mask.to_bytes(width, "little") for mask in patterns)
    bits = np.frombuffer(raw, np.uint8).reshape(len(patterns), width)
    return np.unpackbits(bits, axis=1, bitorder="little")[:, list(operators)]


def solve_relaxation(contains: NDArray[np.uint8], gains: NDArray[np.float64]) -> Relaxation | None:
    """Solve the linear program over all columns; None if the solver fails.

    ``contains`` is the matrix of :func:`incidence`; each of its rows is a column of the program.
    """
    tolerance = _TOLERANCE * float(gains.max())
    sizes = contains.sum(axis=1)
    active = np.argsort(-gains / sizes, kind="stable")[:_COLUMNS_PER_ROUND]
    while True:
        matrix = contains[active].T.astype(np.float64)
        result = linprog(-gains[active], A_ub=matrix, b_ub=np.ones(len(matrix)), method="highs")
        if result.status != 0:
            return None
        prices = np.maximum(0.0, -result.ineqlin.marginals)
        losses = contains @ prices - gains
        # Active columns can have a negative loss only within the solver's tolerance.
        profitable = np.setdiff1d(np.flatnonzero(losses < -tolerance), active)
        if not len(profitable):
            break
        entering = profitable[np.argsort(losses[profitable], kind="stable")[:_COLUMNS_PER_ROUND]]
        active = np.concatenate([active, entering])
    # Losses below 0 are rounding errors. A partition has at most one column for each operator.
    bound = float(prices.sum()) + contains.shape[1] * max(0.0, -float(losses.min()))
    support = tuple(int(at) for at in active[result.x > _TOLERANCE])
    return Relaxation(bound, np.maximum(losses, 0.0), support)


MAX_COLUMNS = 200_000
_MICROSECONDS = 1e6
"""Gains in the program are in microseconds: the solver's tolerances are absolute, and in this unit
gains are a few to a few thousand."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The legal connected patterns of a graph that have a positive gain.

    The code generator may not support some of them.
    """

    patterns: tuple[Mask, ...]
    gains: tuple[float, ...]
    """Modelled gain of each pattern, in seconds."""
    legal_count: int
    """Legal patterns that were enumerated, with or without a gain."""
    is_complete: bool
    """Whether all patterns were enumerated."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """Result of :func:`find_optimum`."""

    partition: Partition
    gain: float
    """Modelled gain over the unfused partition, in seconds."""
    proven: bool
    """Whether the partition is optimal among partitions of connected patterns."""
    columns: int
    """Legal patterns that were enumerated."""
    rounds: int
    """Integer programs that were solved."""
    stopped: Literal["optimal", "too many patterns", "time"]


def enumerate_columns(delta: DeltaEvaluator, max_columns: int = MAX_COLUMNS) -> Columns:
    """Enumerate convex connected sets of operators, smallest first.

    Stops after ``max_columns`` legal sets. From each such set of several operators, the first or
    last operator can be removed so that the rest is still connected, so adding neighbours one at a
    time reaches all sets. A set without a row layout
    (:func:`~nostall.fusion.evaluate.legality.row_layout`) is not extended, because no superset has
    one.
    """
    graph = delta.graph
    sharing = neighbours(graph)
    layer = {
        1 << i: (graph.ancestors[i], graph.descendants[i], sharing[i]) for i in graph.operators
    }
    patterns: list[Mask] = []
    gains: list[float] = []
    legal_count = 0
    for size in range(1, MAX_OPERATORS + 1):
        wider: dict[Mask, tuple[Mask, Mask, Mask]] = {}
        for mask, (above, below, around) in layer.items():
            gain = delta.gain(mask)
            if gain is None and row_layout(delta.work, mask) is None:
                continue
            legal_count += gain is not None
            if gain is not None and gain > 0 and size > 1:
                patterns.append(mask)
                gains.append(gain)
            if legal_count > max_columns or len(wider) > max_columns:
                return Columns(tuple(patterns), tuple(gains), legal_count, False)
            for index in members(around & ~mask):
                extended = mask | 1 << index
                if extended in wider:
                    continue
                up, down = above | graph.ancestors[index], below | graph.descendants[index]
                if not up & down & ~extended:
                    wider[extended] = up, down, around | sharing[index]
        if not wider:
            break
        layer = wider
    return Columns(tuple(patterns), tuple(gains), legal_count, True)


def find_optimum(
    delta: DeltaEvaluator,
    *,
    max_columns: int = MAX_COLUMNS,
    seconds: float = 120.0,
    known: Partition | None = None,
) -> Optimum:
    """The partition with the largest gain, if ``max_columns`` and ``seconds`` suffice to prove it.

    ``known`` is any partition of connected kernels; a good one shortens the proof. It is returned,
    with ``proven`` False, if there is no proof.
    """
    known = known or Partition.unfused(delta.graph)
    columns = enumerate_columns(delta, max_columns)
    count = columns.legal_count
    if not columns.is_complete:
        return Optimum(known, _gain(delta, known), False, count, 0, "too many patterns")
    deadline = monotonic() + seconds
    relevant = _relevant_columns(delta, columns, _gain(delta, known), deadline)
    cuts: list[list[int]] = []
    rounds = 0
    while relevant is not None:
        rounds += 1
        selected = _solve(delta, relevant, cuts, deadline - monotonic())
        if selected is None:
            break
        patterns = [relevant.patterns[at] for at in selected]
        unsupported = [at for at in selected if not delta.can_fuse(relevant.patterns[at])]
        if unsupported:
            cuts += [[at] for at in unsupported]
            continue
        partition = _partition(delta, patterns)
        cycle = _find_cycle(delta, partition)
        if cycle is None:
            best = max(known, partition, key=lambda candidate: _gain(delta, candidate))
            return Optimum(best, _gain(delta, best), True, count, rounds, "optimal")
        cuts.append([at for at in selected if relevant.patterns[at] in cycle])
    return Optimum(known, _gain(delta, known), False, count, rounds, "time")


def _gain(delta: DeltaEvaluator, partition: Partition) -> float:
    return sum(delta.gain(mask) or 0.0 for mask in partition.groups)


def _relevant_columns(
    delta: DeltaEvaluator, columns: Columns, known_gain: float, deadline: float
) -> Columns | None:
    """The columns that a partition with at least ``known_gain`` can contain; None at the deadline.

    Columns of the linear program's solution that the code generator does not support are removed
    first, because they would make the bound too high.
    """
    gains = np.array(columns.gains) * _MICROSECONDS
    contains = incidence(columns.patterns, delta.graph.operators)
    while len(gains):
        solution = solve_relaxation(contains, gains) if monotonic() < deadline else None
        if solution is None:
            return None
        unsupported = [at for at in solution.support if not delta.can_fuse(columns.patterns[at])]
        if not unsupported:
            within = solution.bound - solution.losses >= known_gain * _MICROSECONDS
            return _select(columns, np.flatnonzero(within))
        rest = np.setdiff1d(np.arange(len(gains)), unsupported)
        columns, gains, contains = _select(columns, rest), gains[rest], contains[rest]
    return columns


def _select(columns: Columns, positions: Iterable[int]) -> Columns:
    """The columns at these positions."""
    at = [int(position) for position in positions]
    patterns = tuple(columns.patterns[i] for i in at)
    gains = tuple(columns.gains[i] for i in at)
    return Columns(patterns, gains, columns.legal_count, columns.is_complete)


def _solve(
    delta: DeltaEvaluator, columns: Columns, cuts: Sequence[Sequence[int]], seconds: float
) -> list[int] | None:
    """Solve the integer program. Returns the selected columns; None if the time is not enough.

    A cut is a set of columns that must not all be selected.
    """
    if not columns.patterns:
        return []
    if seconds <= 0:
        return None
    contained = incidence(columns.patterns, delta.graph.operators).T
    forbidden = np.zeros((len(cuts), len(columns.patterns)))
    for row, cut in enumerate(cuts):
        forbidden[row, cut] = 1
    limits = np.array([1.0] * len(contained) + [len(cut) - 1.0 for cut in cuts])
    result = milp(
        -np.array(columns.gains) * _MICROSECONDS,
        integrality=np.ones(len(columns.patterns)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(csr_array(np.vstack([contained, forbidden])), ub=limits),
        options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )
    if result.status != 0:
        return None
    return [int(at) for at in np.flatnonzero(result.x > 0.5)]


def _partition(delta: DeltaEvaluator, patterns: Sequence[Mask]) -> Partition:
    """The partition with these patterns; other operators stay single."""
    covered = 0
    for mask in patterns:
        covered |= mask
    single = [1 << i for i in delta.graph.operators if not covered >> i & 1]
    return Partition.from_groups([*patterns, *single])


def _find_cycle(delta: DeltaEvaluator, partition: Partition) -> set[Mask] | None:
    """The patterns of several operators on one cycle of the contracted graph; None if acyclic."""
    graph = delta.graph
    kernel_of = {index: mask for mask in partition.groups for index in members(mask)}
    # A node without a kernel is represented by its own mask. Its index could equal a kernel's mask.
    place = {node.index: kernel_of.get(node.index, 1 << node.index) for node in graph}
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
