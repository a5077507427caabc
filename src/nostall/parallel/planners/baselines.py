"""Baseline planners: even split, GPipe, pure data parallelism and PipeDream."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.chain_dp import best_partitions, search_grid
from nostall.parallel.planners.cut_positions import balanced_cuts, straight_stages
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fastest import fastest_or_cheap
from nostall.parallel.planners.memory_fit import fit_to_memory


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
