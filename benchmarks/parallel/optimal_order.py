"""Optimum of a small planning problem with free order, by CP-SAT (OR-tools, extra nostall[dev]).

The search space is that of the simulator without its policies.  Workers run forward and backward
passes (undivided, or split in two) in any order, each kind in the order of the micro-batches.
Transfers and all-reduces start when their resources are free, or later.  A stage may hold any
number of micro-batches.  Times are rounded to microseconds.  Plans of one stage are simulated,
because their order does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.planners.baselines import mappings
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.simulate import Costs, costs, critical_path_s, load_bound_s, simulated_s

TICK_S = 1e-6
MAX_SOLVED = 60
SECONDS_PER_MAPPING = 5.0


@dataclass(frozen=True)
class FreeOptimum:
    """The best order over all mappings."""

    seconds: float
    proven: bool
    """Whether no better order exists, except for rounding."""
    solved: int
    """Number of mappings that CP-SAT solved."""


def free_optimum(work: Workload, incumbent: float) -> FreeOptimum:
    """The best order over all mappings, at most ``incumbent`` seconds.

    Mappings whose critical path or busiest resource takes longer are not solved.
    """
    best, proven, solved = incumbent, True, 0
    bounds = []
    for stages in mappings(len(work.profile), len(work.cluster)):
        if len(stages) == 1:
            if fit_to_memory(work, alone := Plan(stages)) is not None:
                best = min(best, simulated_s(work, alone))
            continue
        for policy in ("list", "zero-bubble"):  # the backward pass whole, or in two parts
            plan = Plan(stages, policy)
            if fit_to_memory(work, plan) == plan:
                bounds.append((max(critical_path_s(work, plan), load_bound_s(work, plan)), plan))
    for bound, plan in sorted(bounds, key=lambda pair: pair[0]):
        if bound >= best * (1 - 1e-6):
            break
        if solved >= MAX_SOLVED:
            return FreeOptimum(best, False, solved)
        solved += 1
        seconds, is_proven = best_order(costs(work, plan), work.micro_batches, best)
        best, proven = min(best, seconds), proven and is_proven
    return FreeOptimum(best, proven, solved)


def best_order(costs: Costs, micro_batches: int, limit: float) -> tuple[float, bool]:
    """(seconds of the best order of a plan with these costs, whether it is proven optimal).

    The seconds are ``limit`` if no order is faster.
    """
    model = cp_model.CpModel()
    top = round(limit / TICK_S)
    busy: defaultdict[tuple[str, int], list[Any]] = defaultdict(list)
    variables = _Variables(model, top, busy)
    stages, split = len(costs.forward), any(costs.weight_gradient)
    ends: dict[tuple[str, int, int], Any] = {}
    for m in range(micro_batches):
        for s in range(stages):
            after = (
                [variables.transfer(costs.forward_transfers[s - 1], ends["F", s - 1, m])]
                if s
                else []
            )
            ends["F", s, m] = variables.work(costs.worker[s], costs.forward[s], after)
        for s in reversed(range(stages)):
            after = [ends["F", s, m]]
            if s + 1 < stages:
                after.append(variables.transfer(costs.backward_transfers[s], ends["B", s + 1, m]))
            ends["B", s, m] = variables.work(costs.worker[s], costs.backward[s], after)
            if split:
                ends["W", s, m] = variables.work(
                    costs.worker[s], costs.weight_gradient[s], [ends["B", s, m]]
                )
    for (kind, s, m), end in ends.items():
        if m:
            model.add(end >= ends[kind, s, m - 1])
    total = model.new_int_var(0, top, "total")
    for s in range(stages):
        last = [ends[kind, s, micro_batches - 1] for kind in ("W" if split else "B")]
        model.add(total >= variables.transfer(costs.allreduce[s], *last))
    for intervals in busy.values():
        model.add_no_overlap(intervals)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = SECONDS_PER_MAPPING
    solver.parameters.num_workers = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return limit, True
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return solver.objective_value * TICK_S, status == cp_model.OPTIMAL
    return limit, False


@dataclass
class _Variables:
    """Variables of operations and transfers; ``busy`` collects the intervals of each resource."""

    model: cp_model.CpModel
    top: int
    busy: defaultdict[tuple[str, int], list[Any]]

    def work(self, worker: int, seconds: float, after: list[Any]) -> Any:
        """End of a new operation on a worker that starts after all of ``after``."""
        start = self._start(after)
        size = round(seconds / TICK_S)
        self.busy["worker", worker].append(self.model.new_fixed_size_interval_var(start, size, ""))
        return start + size

    def transfer(self, transfer: Any, *after: Any) -> Any:
        """End of a new transfer, which occupies each of its resources for a time of its own."""
        if transfer.seconds <= 0:
            (end,) = after
            return end
        start = self._start(list(after))
        for resource, seconds in transfer.loads:
            size = round(seconds / TICK_S)
            interval = self.model.new_fixed_size_interval_var(start, size, "")
            self.busy["link", resource].append(interval)
        return start + round(transfer.seconds / TICK_S)

    def _start(self, after: list[Any]) -> Any:
        start = self.model.new_int_var(0, self.top, "")
        for end in after:
            self.model.add(start >= end)
        return start
