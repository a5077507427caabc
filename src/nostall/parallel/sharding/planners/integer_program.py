"""Integer program for the strategies on one mesh dimension, solved by HiGHS.

One binary variable for each class of operators and strategy.  For each edge, one continuous
variable for each pair of placements, of the producer and of the consumer, that a redistribution
connects; its sums over one of the two equal the binaries of that side (as in AutoParallel).  The
linear relaxation is solved first: its solution is the optimum if it is integral.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import MissingPart
from nostall.parallel.errors import Infeasible
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.graph import Assignment, Edge
from nostall.parallel.sharding.placements import Placements, Strategy
from nostall.parallel.sharding.planners.tied import EdgeClass, TiedGraph
from nostall.parallel.sharding.schedule import may_overlap

_UNIT_S = 1e-6
"""The objective is in microseconds, because tolerances of the solver are absolute."""
_TIE_S = 1e-9
"""Price of each step of a redistribution beyond its seconds, so that of equally fast plans the one
with fewer steps is found."""
_INTEGRAL = 1e-6
Allowed = Sequence[frozenset[int]]
"""For each operator, the numbers of the strategies that it may have."""


class OutOfTime(Infeasible):
    """The program has no solution within its time limit."""


@dataclass(frozen=True)
class Problem:
    """The strategies on one mesh dimension, with those on the other dimensions fixed."""

    prices: Prices
    tied: TiedGraph
    mesh_dim: int
    others: Assignment
    """An assignment whose entry for ``mesh_dim`` is ignored."""
    allowed: Allowed | None = None
    """None allows all strategies."""
    memory: float | None = None
    """Limit on the bytes of parameter state and of stored activations; None for no limit."""
    state_factor: float = 4.0
    exposed: float = 1.0
    """Share that counts of the seconds of redistributions that may run beside the operators."""

    def strategies(self, operator: int, number: int) -> list[Strategy]:
        """Strategies of an operator on all mesh dimensions if it has ``number`` on this one."""
        own = self.prices.graph.operators[operator].strategies
        return [
            own[d][number if d == self.mesh_dim else self.others[d][operator]]
            for d in range(len(own))
        ]


@dataclass(frozen=True)
class Solution:
    """Strategies of all operators on one mesh dimension."""

    numbers: tuple[int, ...]
    objective_s: float
    bound_s: float
    """Optimum of the linear relaxation: no tied plan is faster."""
    is_integral: bool
    """Whether the relaxation was integral, so that no branching was needed."""
    columns: int
    rows: int
    seconds: float


@dataclass
class _Columns:
    """Columns and equality rows of the program."""

    cost: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)
    """(row, column, value)."""
    right: list[float] = field(default_factory=list)

    def column(self, cost: float) -> int:
        self.cost.append(cost / _UNIT_S)
        self.upper.append(1.0)
        return len(self.cost) - 1

    def row(self, right: float) -> int:
        self.right.append(right)
        return len(self.right) - 1


def solve(problem: Problem, seconds: float) -> Solution:
    """The optimum of a problem, or the best solution found within ``seconds``.

    Raises :class:`Infeasible` if no assignment fits the memory limit or the allowed strategies, and
    :class:`MissingPart` without SciPy.
    """
    start = monotonic()
    program, binaries = _Columns(), list[dict[int, int]]()
    for members in problem.tied.members:
        binaries.append(_add_class(problem, program, members))
    for edge in problem.tied.edges:
        _add_edge(problem, program, edge, binaries)
    memory = _memory_row(problem, binaries, len(program.cost))
    values, bound = _minimize(program, memory, None, seconds)
    chosen = [column for columns in binaries for column in columns.values()]
    is_integral = bool(np.all(np.minimum(values[chosen], 1 - values[chosen]) < _INTEGRAL))
    objective = bound
    if not is_integral:
        left = max(1.0, seconds - (monotonic() - start))
        values, objective = _minimize(program, memory, chosen, left)
    by_class = [max(columns, key=lambda k: values[columns[k]]) for columns in binaries]
    return Solution(
        tuple(by_class[c] for c in problem.tied.class_of),
        objective * _UNIT_S,
        bound * _UNIT_S,
        is_integral,
        len(program.cost),
        len(program.right),
        monotonic() - start,
    )


def _add_class(problem: Problem, program: _Columns, members: Sequence[int]) -> dict[int, int]:
    """Add the binaries of a class; returns their columns by the number of the strategy."""
    first = members[0]
    operator = problem.prices.graph.operators[first]
    one, columns = program.row(1.0), dict[int, int]()
    for number in range(len(operator.strategies[problem.mesh_dim])):
        if problem.allowed is not None and not all(number in problem.allowed[m] for m in members):
            continue
        seconds = problem.prices.operator_s(operator, problem.strategies(first, number))
        if seconds is None:
            continue
        columns[number] = program.column(seconds * len(members))
        program.entries.append((one, columns[number], 1.0))
    if not columns:
        raise Infeasible(
            f"operator {operator.name} ({operator.target}) has no strategy that is allowed; leave "
            "the restriction out, or use a mesh whose sizes divide the dimensions of its tensors"
        )
    return columns


def edge_share(problem: Problem, edge: Edge) -> float:
    """Share that counts of the seconds of an edge's redistribution."""
    return problem.exposed if may_overlap(problem.prices.graph, edge) else 1.0


def _add_edge(
    problem: Problem, program: _Columns, edge: EdgeClass, binaries: Sequence[dict[int, int]]
) -> None:
    """Add the pairs of placements of an edge, and the rows that join them to both sides."""
    graph, example = problem.prices.graph, edge.example
    info = graph.tensors[example.tensor]
    share = edge_share(problem, example)

    sources = _by_placements(problem, binaries[edge.producer], edge, read=False)
    targets = _by_placements(problem, binaries[edge.consumer], edge, read=True)
    source_rows = {p: program.row(0.0) for p in sources}
    target_rows = {p: program.row(0.0) for p in targets}
    for placements, rows, side in (
        *((p, source_rows, c) for p, c in sources.items()),
        *((p, target_rows, c) for p, c in targets.items()),
    ):
        program.entries += [(rows[placements], column, -1.0) for column in side]
    for source, source_row in source_rows.items():
        for target, target_row in target_rows.items():
            steps = problem.prices.redistribution(info, source, target)
            if steps is not None:
                seconds = share * sum(step.seconds for step in steps) + _TIE_S * len(steps)
                pair = program.column(seconds * edge.count)
                program.entries += [(source_row, pair, 1.0), (target_row, pair, 1.0)]


def _by_placements(
    problem: Problem, columns: dict[int, int], edge: EdgeClass, *, read: bool
) -> dict[Placements, list[int]]:
    """The binaries of one end of an edge by the placements that its tensor has there."""
    example = edge.example
    operator = example.consumer if read else example.producer
    own = problem.prices.graph.operators[operator].strategies
    ends = [
        [s.inputs[example.position] if read else s.outputs[example.output] for s in strategies]
        for strategies in own
    ]
    fixed = [end[numbers[operator]] for end, numbers in zip(ends, problem.others, strict=True)]
    before, after = tuple(fixed[: problem.mesh_dim]), tuple(fixed[problem.mesh_dim + 1 :])
    result: dict[Placements, list[int]] = {}
    for number, column in columns.items():
        placements = (*before, ends[problem.mesh_dim][number], *after)
        result.setdefault(placements, []).append(column)
    return result


def _memory_row(
    problem: Problem, binaries: Sequence[dict[int, int]], columns: int
) -> tuple[NDArray[np.float64], float] | None:
    """Bytes by column and their limit: parameter state, and activations that are stored."""
    if problem.memory is None:
        return None
    graph = problem.prices.graph
    saved = set(graph.saved_tensors)
    weights = np.zeros(columns)
    for members, own in zip(problem.tied.members, binaries, strict=True):
        operator = graph.operators[members[0]]
        is_state = operator.kind == "parameter"
        for number, column in own.items():
            chosen = problem.strategies(members[0], number)
            for member in members:
                for position, tensor in enumerate(graph.operators[member].outputs):
                    if not is_state and (tensor not in saved or not operator.moves_memory):
                        continue
                    placements = tuple(s.outputs[position] for s in chosen)
                    size = problem.prices.local_bytes(graph.tensors[tensor], placements) or 0.0
                    weights[column] += size * (problem.state_factor if is_state else 1.0)
    return weights, problem.memory


def _minimize(
    program: _Columns,
    memory: tuple[NDArray[np.float64], float] | None,
    binaries: Sequence[int] | None,
    seconds: float,
) -> tuple[NDArray[np.float64], float]:
    """Solve the program, with ``binaries`` as integers; returns the values and the objective."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise MissingPart(
            "the planner sharding needs SciPy, which is missing; pip install 'nostall[sharding]'"
        ) from error
    entries = np.array(program.entries)  # exact for numbers of rows and columns below 2^53
    shape = (len(program.right), len(program.cost))
    rows, columns = entries[:, 0].astype(int), entries[:, 1].astype(int)
    matrix = csr_array((entries[:, 2], (rows, columns)), shape=shape)
    constraints = [LinearConstraint(matrix, program.right, program.right)]
    if memory is not None:
        weights, limit = memory
        constraints.append(LinearConstraint(weights[None, :] / limit, -np.inf, 1.0))
    integrality = np.zeros(len(program.cost))
    if binaries is not None:
        integrality[list(binaries)] = 1
    result = milp(
        program.cost,
        integrality=integrality,
        bounds=Bounds(0.0, np.array(program.upper)),
        constraints=constraints,
        options={"time_limit": seconds, "mip_rel_gap": 1e-6},
    )
    if result.x is None:
        kind = OutOfTime if result.status == _TIME_LIMIT else Infeasible
        raise kind(_failure(result.status, memory, seconds))
    return np.asarray(result.x), float(result.fun)


_TIME_LIMIT = 1
"""Status of SciPy's milp."""


def _failure(status: int, memory: tuple[NDArray[np.float64], float] | None, seconds: float) -> str:
    if status == _TIME_LIMIT:
        return (
            f"the integer program has no solution after {seconds:.0f} s; give more --seconds, or a "
            "mesh of one dimension"
        )
    if memory is None:
        return "no assignment of strategies is possible; leave the restriction out"
    return (
        f"no sharding fits into {memory[1] / 2**30:.3g} GiB of a GPU's memory; use more GPUs, a "
        "smaller --global-batch or a smaller --state-factor"
    )
