"""Baseline planners: even split, GPipe, pure data parallelism and PipeDream."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.chain_dp import best_partitions, search_grid
from nostall.parallel.planners.cut_positions import balanced_cuts, straight_stages
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fastest import fastest_or_cheap
from nostall.parallel.planners.memory_fit import fit_to_memory
from nostall.parallel.simulate import simulated_s


def even(workload: Workload, effort: Effort) -> Plan:
    """One stage per GPU with the same number of layers each, in 1F1B order."""
    layers, n = len(workload.profile), _stage_per_gpu(workload)
    cuts = [round(i * layers / n) for i in range(n + 1)]
    return _straight_plan(workload, cuts, "1f1b", effort, "the even split")


def gpipe(workload: Workload, effort: Effort) -> Plan:
    """One stage per GPU with about the same time each, all forward passes first (GPipe)."""
    cuts = balanced_cuts(workload, _stage_per_gpu(workload))
    return _straight_plan(workload, cuts, "gpipe", effort, "the GPipe plan")


def data_parallel(workload: Workload, effort: Effort) -> Plan:
    """The whole model on every GPU; the all-reduce overlaps with the last backward pass."""
    stage = Stage(0, len(workload.profile), tuple(range(len(workload.cluster))))
    return _first_feasible([fit_to_memory(workload, Plan((stage,), "1f1b"))], "data parallelism")


def pipedream(workload: Workload, effort: Effort) -> Plan:
    """PipeDream's partition (SOSP'19), run synchronously in 1F1B order.

    Minimises the bottleneck of max(compute, weight synchronisation per micro-batch) / replicas, on
    GPUs in the order of their numbers and with one level of bandwidths.  Of plans with equal
    bottlenecks, the one with the fewest stages is taken.
    """
    order = tuple(range(len(workload.cluster)))
    partitions = best_partitions(workload, order, search_grid(workload), "hidden", effort)
    ranked = [stages for _, stages in sorted(partitions, key=lambda pair: (pair[0], len(pair[1])))]
    plans = [fit_to_memory(workload, Plan(stages, "1f1b")) for stages in ranked]
    if not ranked and effort.is_over:
        plans = [fastest_or_cheap(workload, None, effort)]
    return _first_feasible(plans, "PipeDream's plan")


def _stage_per_gpu(workload: Workload) -> int:
    """The number of GPUs; raises :class:`BadPlan` if there are fewer layers than GPUs."""
    layers, gpus = len(workload.profile), len(workload.cluster)
    if layers < gpus:
        raise BadPlan(
            f"the planner needs {gpus} stages and the profile has {layers} layers; a stage needs "
            "at least one layer; use fewer GPUs or a planner that replicates stages"
        )
    return gpus


def _straight_plan(
    workload: Workload, cuts: Sequence[int], policy: Policy, effort: Effort, name: str
) -> Plan:
    stages = straight_stages(cuts)
    plans = [
        fit_to_memory(workload, Plan(stages, policy, recompute=recompute))
        for recompute in effort.recompute_options
    ]
    return _first_feasible(plans, name)


def _first_feasible(plans: Sequence[Plan | None], name: str) -> Plan:
    for plan in plans:
        if plan is not None:
            return plan
    raise Infeasible(
        f"{name} does not fit into memory; use more GPUs, a smaller micro-batch, a smaller "
        "--state-factor or another planner"
    )


ORDERS: tuple[Policy, ...] = ("gpipe", "pa", "pb", "list", "zero-bubble")
"""Orders that are tried, for plans with one stage per GPU; 1F1B equals PA without memory limits."""
MAX_PLANS = 200_000


def exhaustive(workload: Workload, effort: Effort) -> Plan:
    """The plan with the least simulated time over all cuts, mappings and orders.

    Raises :class:`BadPlan` if there are more than ``MAX_PLANS`` plans or the time limit is reached,
    because the best of some plans is no optimum, and :class:`Infeasible` if
    none fits into memory.
    """
    layers, gpus = len(workload.profile), len(workload.cluster)
    if gpus >= MAX_PLANS.bit_length():  # the exact number may have thousands of digits
        raise _too_many(f"more than 2^{gpus}", layers, gpus)
    count = count_mappings(layers, gpus) * len(ORDERS)
    if count > MAX_PLANS:
        raise _too_many(f"{count:.3g}", layers, gpus)
    best: tuple[float, Plan] | None = None
    for recompute in effort.recompute_options:
        for i, stages in enumerate(mappings(layers, gpus)):
            if i % 256 == 0:
                effort.report_progress(i * len(ORDERS) / count, "exhaustive")
            for policy in ORDERS if len(stages) > 1 else ORDERS[:1]:
                if effort.is_over:
                    raise BadPlan(
                        f"the time limit of {effort.seconds:g} s ended the exhaustive search at "
                        f"{i / count * len(ORDERS):.0%} of {count} plans; give a larger --seconds, "
                        "or use another planner"
                    )
                plan = fit_to_memory(workload, Plan(stages, policy, recompute=recompute))
                if plan is not None:
                    seconds = simulated_s(workload, plan)
                    if best is None or seconds < best[0]:
                        best = seconds, plan
        if best is not None:
            return best[1]
    raise Infeasible("no plan fits into memory; use more GPUs or a smaller micro-batch")


def _too_many(count: str, layers: int, gpus: int) -> BadPlan:
    return BadPlan(
        f"there are {count} plans for {layers} layers on {gpus} GPUs; allowed are {MAX_PLANS}; use "
        "another planner"
    )


def mappings(layers: int, gpus: int) -> Iterator[tuple[Stage, ...]]:
    """Every sequence of stages: all cuts, combined with all disjoint groups of GPUs."""
    for stages in range(1, min(layers, gpus) + 1):
        assignments = list(_disjoint_groups(tuple(range(gpus)), stages))
        for inner in itertools.combinations(range(1, layers), stages - 1):
            ranges = list(itertools.pairwise((0, *inner, layers)))
            for groups in assignments:
                yield tuple(Stage(a, b, g) for (a, b), g in zip(ranges, groups, strict=True))


def count_mappings(layers: int, gpus: int) -> int:
    """Number of :func:`mappings`, without listing them."""
    return sum(
        math.comb(layers - 1, s - 1)
        * sum((-1) ** k * math.comb(s, k) * (s - k + 1) ** gpus for k in range(s + 1))
        for s in range(1, min(layers, gpus) + 1)
    )


def _disjoint_groups(gpus: tuple[int, ...], stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """All sequences of disjoint nonempty groups of GPUs; some GPUs may stay unused."""
    for owner in itertools.product(range(stages + 1), repeat=len(gpus)):
        groups = tuple(
            tuple(g for g, o in zip(gpus, owner, strict=True) if o == s) for s in range(stages)
        )
        if all(groups):
            yield groups
