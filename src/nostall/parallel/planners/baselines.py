"""What planners are compared with: even split, GPipe, pure data parallelism, PipeDream."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from nostall.parallel.errors import BadPlan, Infeasible
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.planners.chain_dp import best_chains, grid
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fitting import fitted


def even(work: Workload, effort: Effort) -> Plan:
    """One GPU a stage, the same number of layers in each, 1F1B."""
    layers, n = len(work.profile), _straight(work)
    cuts = [round(i * layers / n) for i in range(n + 1)]
    return _fit(work, cuts, "1f1b", effort, "the even split")


def gpipe(work: Workload, effort: Effort) -> Plan:
    """One GPU a stage, about the same time in each, all forwards before all backwards."""
    return _fit(work, balanced_cuts(work, _straight(work)), "gpipe", effort, "the GPipe plan")


def data_parallel(work: Workload, effort: Effort) -> Plan:
    """The whole model on every GPU, the all-reduce overlapped with the last backward pass."""
    alone = Stage(0, len(work.profile), tuple(range(len(work.cluster))))
    return _first([fitted(work, Plan((alone,), "1f1b"))], "data parallelism")


def pipedream(work: Workload, effort: Effort) -> Plan:
    """PipeDream's partitioning (SOSP'19), run synchronously with 1F1B.

    Least bottleneck of max(compute, weight synchronisation per micro-batch) / replicas, on GPUs
    in the order of their numbers and with one level of bandwidths; the fewest stages among equals.
    """
    found = best_chains(work, tuple(range(len(work.cluster))), grid(work), "hidden")
    ranked = [stages for _, stages in sorted(found, key=lambda pair: (pair[0], len(pair[1])))]
    return _first([fitted(work, Plan(stages, "1f1b")) for stages in ranked], "PipeDream's plan")


def balanced_cuts(work: Workload, stages: int) -> list[int]:
    """Positions at which stages of about equal time begin, and the end; each has a layer."""
    time = [f + b for f, b in zip(work.forward, work.backward, strict=True)]
    layers = len(work.profile)
    cuts = [0]
    for i in range(1, stages):
        wanted = time[-1] * i / stages
        at = bisect.bisect_left(time, wanted)
        if at > 0 and wanted - time[at - 1] < time[at] - wanted:
            at -= 1
        cuts.append(max(cuts[-1] + 1, min(at, layers - (stages - i))))
    return [*cuts, layers]


def straight(cuts: Sequence[int]) -> tuple[Stage, ...]:
    """Stages between the cuts, one GPU each, by number."""
    return tuple(Stage(a, b, (g,)) for g, (a, b) in enumerate(itertools.pairwise(cuts)))


def _straight(work: Workload) -> int:
    if len(work.profile) < len(work.cluster):
        raise BadPlan(
            f"{len(work.cluster)} stages wanted for {len(work.profile)} layers; a stage needs at "
            "least one; use fewer GPUs or a planner that replicates stages"
        )
    return len(work.cluster)


def _fit(work: Workload, cuts: Sequence[int], policy: Policy, effort: Effort, what: str) -> Plan:
    tries = (False, True) if effort.recompute else (False,)
    return _first(
        [fitted(work, Plan(straight(cuts), policy, recompute=recompute)) for recompute in tries],
        what,
    )


def _first(plans: Sequence[Plan | None], what: str) -> Plan:
    for plan in plans:
        if plan is not None:
            return plan
    raise Infeasible(
        f"{what} does not fit into memory; use more GPUs, a smaller micro-batch, a smaller "
        "--state-factor or another planner"
    )
