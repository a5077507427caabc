"""The planner ``sharding``: exact on one mesh dimension at a time, and never worse than a rule.

On two mesh dimensions, it solves one dimension with the other fixed and repeats this until the
modelled time stays the same.  It starts from the plan of each rule and from that of one GPU, so its
plan is never worse than any of them under the same cost model, also if its limit ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nostall.core.compile_clock import planning_clock
from nostall.parallel.errors import Infeasible
from nostall.parallel.sharding.cost.memory import ADAM_STATE_FACTOR, MemoryUse, memory_use
from nostall.parallel.sharding.cost.prices import Prices, StepCost, step_cost
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.cost.timeline import Timeline, timeline
from nostall.parallel.sharding.graph import Assignment, ShardingGraph, replicated
from nostall.parallel.sharding.planners.integer_program import OutOfTime, Problem, Solution, solve
from nostall.parallel.sharding.planners.rules import RULES, Rule, allowed_strategies
from nostall.parallel.sharding.planners.tied import tie

MAX_ROUNDS = 4
"""Rounds over the mesh dimensions; each one is solved once in a round."""
MAX_STARTS = 2
"""Fastest rules from whose plans the search begins on two mesh dimensions."""
DEFAULT_SECONDS = 120.0
EXPOSED = (1.0, 0.2, 0.0)
"""Shares of the seconds of redistributions beside the operators for which programs are solved; the
timeline of each plan decides.  The relaxation with share 0 is a bound."""
RULE_EXPOSED = 0.2
"""The share for the plans of rules."""
_PROVEN = 1e-4
"""Relative tolerance between a plan and its bound."""
_SAME = 1e-5
"""Relative difference of times below which a solution is no better."""
_MEMORY_TRIES = 5
"""How often the limit in the integer program is lowered if the peak exceeds the memory."""


@dataclass(frozen=True)
class Options:
    """Options of a planner of shardings."""

    memory: float | None = None
    """Bytes of each GPU; None for no limit."""
    state_factor: float = ADAM_STATE_FACTOR
    seconds: float = DEFAULT_SECONDS
    """Time limit."""
    updates: float = 1.0
    """Steps of the optimiser for one of the graph; fewer for a micro-batch."""
    report: Callable[[float, str], None] | None = None
    started: float = field(default_factory=planning_clock)
    """Start of the run by :func:`planning_clock`."""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, without those of compilation."""
        return planning_clock() - self.started

    @property
    def remaining_s(self) -> float:
        """Seconds until the time limit, at least one."""
        return max(1.0, self.seconds - self.elapsed_s)

    @property
    def is_over(self) -> bool:
        """Whether the time limit is reached."""
        return self.elapsed_s >= self.seconds

    def report_progress(self, fraction: float, step: str) -> None:
        """Call the progress callback, if there is one."""
        if self.report is not None:
            self.report(min(1.0, fraction), step)


_UPDATE_SHARE = 0.72
"""Share of the operators' memory rate that a fused AdamW reaches: seven measured steps together
(``updates_ms`` of ``benchmarks/parallel/results/peers_2.json``, two NVIDIA H200, bfloat16)."""


def update_s(state: float, state_factor: float, rates: DeviceRates) -> float:
    """Modelled seconds of the optimiser on ``state`` bytes of parameters, gradients and its own."""
    return (2 * state_factor - 1) * state / state_factor / (_UPDATE_SHARE * rates.memory)


@dataclass(frozen=True, eq=False)
class ShardingPlan:
    """An assignment of strategies with its modelled cost."""

    name: str
    """The planner or rule that made it."""
    prices: Prices
    assignment: Assignment
    cost: StepCost
    times: Timeline
    memory: MemoryUse
    solutions: tuple[Solution, ...] = ()
    """The integer programs that led to it, in the order in which they were solved."""
    state_factor: float = ADAM_STATE_FACTOR
    """Bytes of parameters, gradients and the optimiser's state over those of the parameters."""
    bound_s: float = 0.0
    """No plan that treats tied operators equally is faster under the cost model; 0 if unknown."""

    @property
    def step_s(self) -> float:
        """Modelled seconds of a step, with overlap."""
        return self.times.step_s

    @property
    def one_gpu_s(self) -> float:
        """Modelled seconds of a step on one GPU, whether or not it fits into its memory."""
        return timeline(self.prices, replicated(self.prices.graph)).step_s

    @property
    def is_proven(self) -> bool:
        """Whether the plan is the fastest under the cost model, among those of the bound."""
        return self.bound_s > 0 and self.step_s <= self.bound_s * (1 + _PROVEN)

    @property
    def update_s(self) -> float:
        """Modelled seconds of the optimiser, which reads the state and writes all of it but the
        gradients."""
        return update_s(self.memory.state, self.state_factor, self.prices.rates)

    @property
    def whole_s(self) -> float:
        """Modelled seconds of a step with its optimiser."""
        return self.step_s + self.update_s

    def renamed(self, name: str) -> ShardingPlan:
        """The same plan under the name of another planner."""
        return replace(self, name=name)

    def fits(self, memory: float | None) -> bool:
        """Whether the modelled peak is within a limit."""
        return memory is None or self.memory.peak <= memory


def plan_sharding(prices: Prices, options: Options) -> tuple[ShardingPlan, list[ShardingPlan]]:
    """The plan with the least modelled time, its optimiser's included, that fits into memory, and
    the plans of the rules.

    The rules' plans are sorted by time and may exceed the memory limit.  Raises :class:`Infeasible`
    if no plan fits, or if a mesh dimension divides no tensor.
    """
    _check_divisible(prices.graph)
    rules: list[ShardingPlan] = []
    for number, rule in enumerate(RULES.values()):
        options.report_progress(0.1 * number, rule.name)
        if (plan := plan_by_rule(prices, rule, options)) is not None:
            rules.append(plan)
    rules.sort(key=lambda plan: plan.step_s)
    starts = [plan for plan in rules if plan.name != "replicated"]
    # On one mesh dimension, the optimum does not depend on the start.
    starts = starts[: 1 if len(prices.graph.mesh) == 1 else MAX_STARTS]
    found: list[ShardingPlan] = []
    # The relaxation is a bound on one mesh dimension only.
    shares = EXPOSED if len(prices.graph.mesh) == 1 else EXPOSED[:2]
    tasks = [(start, exposed) for start in starts for exposed in shares]
    for number, (start, exposed) in enumerate(tasks):
        if found and options.is_over:
            break
        options.report_progress(0.4 + 0.6 * number / len(tasks), "sharding")
        if (improved := _within_memory(prices, start, options, exposed)) is not None:
            found.append(improved)
    bound_s = max((plan.bound_s for plan in found), default=0.0)
    one_gpu = priced_plan("one GPU", prices, replicated(prices.graph), options.state_factor)
    found += [plan for plan in (*rules, one_gpu) if plan.fits(options.memory)]
    if not found:
        raise no_plan_fits(rules, options)
    best = min(found, key=lambda plan: plan.step_s + options.updates * plan.update_s)
    return replace(best, name="sharding", bound_s=bound_s), rules


def _check_divisible(graph: ShardingGraph) -> None:
    """Raise :class:`Infeasible` if all plans do all of the work on each GPU of a mesh dimension."""
    for mesh_dim, size in enumerate(graph.mesh):
        if size > 1 and not any(
            strategy.splits_work
            for operator in graph.operators
            for strategy in operator.strategies[mesh_dim]
        ):
            raise Infeasible(
                f"no dimension of a parameter, of the batch or of an activation is a multiple of "
                f"{size}, so each of the {size} GPUs along mesh dimension {mesh_dim} would do all "
                "of the work; use another --mesh or number of GPUs, or a --global-batch that is a "
                "multiple of it"
            )


def no_plan_fits(plans: Sequence[ShardingPlan], options: Options) -> Infeasible:
    """The error if no plan fits; ``plans`` are those that were found."""
    limit = "a GPU's memory" if options.memory is None else f"{options.memory / 2**30:.3g} GiB"
    needed = min((plan.memory.peak for plan in plans), default=0.0) / 2**30
    found = f"the smallest found needs {needed:.3g} GiB, modelled" if plans else "none was found"
    return Infeasible(
        f"no sharding fits into {limit} of a GPU ({found}); use more GPUs, a smaller "
        "--global-batch or a smaller --state-factor"
    )


def plan_by_rule(prices: Prices, rule: Rule, options: Options) -> ShardingPlan | None:
    """The fastest plan under a rule, without a memory limit; None if the rule is not possible."""
    graph = prices.graph
    allowed = {d: allowed_strategies(rule, graph, d) for d in range(len(graph.mesh))}
    # Parameters and batch go to their placements first, so that each dimension sees the others'.
    start = tuple(
        tuple(min(own) if len(own) == 1 else 0 for own in allowed[d])
        for d in range(len(graph.mesh))
    )
    try:
        return _alternate(prices, rule.name, start, options, allowed, RULE_EXPOSED)
    except Infeasible:
        return None


def _within_memory(
    prices: Prices, start: ShardingPlan, options: Options, exposed: float
) -> ShardingPlan | None:
    """Improve a plan without restrictions of its placements; None if none fits into memory.

    The memory row of the program is an estimate, so it is used only if the plan without it does not
    fit.  Its limit is then lowered until the peak fits.
    """
    limit: float | None = None
    for _ in range(1 + _MEMORY_TRIES):
        limited = replace(options, memory=limit)
        try:
            plan = _alternate(prices, "sharding", start.assignment, limited, None, exposed)
        except Infeasible:  # under this limit, or within the time limit
            return None
        if options.memory is None or plan.fits(options.memory):
            is_bound = len(prices.graph.mesh) == 1 and exposed == 0.0 and limit is None
            return replace(plan, bound_s=plan.solutions[0].bound_s if is_bound else 0.0)
        limit = (
            options.memory if limit is None else limit * 0.95 * options.memory / plan.memory.peak
        )
    return None


def _alternate(
    prices: Prices,
    name: str,
    start: Assignment,
    options: Options,
    allowed: dict[int, list[frozenset[int]]] | None,
    exposed: float,
) -> ShardingPlan:
    """Solve one mesh dimension after the other until nothing changes; the innermost first."""
    graph, current = prices.graph, start
    dimensions = len(graph.mesh)
    best_s, solutions = float("inf"), list[Solution]()
    since_better = 0
    for number in range(MAX_ROUNDS * dimensions):
        mesh_dim = dimensions - 1 - number % dimensions
        others = tuple(own for d, own in enumerate(current) if d != mesh_dim)
        problem = Problem(
            prices,
            tie(graph, others),
            mesh_dim,
            current,
            allowed[mesh_dim] if allowed is not None else None,
            options.memory if allowed is None else None,
            options.state_factor,
            exposed,
        )
        solution = _solve(problem, options.remaining_s)
        solutions.append(solution)
        current = (*current[:mesh_dim], solution.numbers, *current[mesh_dim + 1 :])
        is_better = solution.objective_s < best_s * (1 - _SAME)
        since_better = 0 if is_better else since_better + 1
        best_s = min(best_s, solution.objective_s)
        everything_solved = number + 1 >= dimensions
        if everything_solved and (dimensions == 1 or since_better >= dimensions - 1):
            break
        if everything_solved and options.is_over:
            break
    return priced_plan(name, prices, current, options.state_factor, tuple(solutions))


def _solve(problem: Problem, seconds: float) -> Solution:
    """The program's optimum; without a memory limit, annealing if it is not solved in time."""
    try:
        return solve(problem, seconds)
    except OutOfTime:
        if problem.memory is not None:
            raise
        from nostall.parallel.sharding.planners.tree_annealing import anneal

        return anneal(problem, seconds)


def priced_plan(
    name: str,
    prices: Prices,
    assignment: Assignment,
    state_factor: float,
    solutions: tuple[Solution, ...] = (),
) -> ShardingPlan:
    """The plan of an assignment that is possible, with its modelled cost."""
    cost = step_cost(prices, assignment)
    assert cost is not None  # the assignment is possible
    memory = memory_use(prices, assignment, state_factor)
    times = timeline(prices, assignment)
    return ShardingPlan(name, prices, assignment, cost, times, memory, solutions, state_factor)
