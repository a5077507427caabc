"""SPP (arXiv:2204.10562): ordering of GPUs, partition and mapping, then list scheduling.

Only the abstract was at hand; how the parts work is our reading (see docs/parallel.md): devices
are put in a row by recursive minimum cuts, a dynamic programme finds the least bottleneck for
every number of stages, and a greedy list order executes each; the fastest in the simulator is
taken.  Greedy orders finish within (M + 4 S - 4) times the largest load per micro-batch, which
tests check.
"""

from __future__ import annotations

from functools import lru_cache

from nostall.parallel.errors import Infeasible
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.chain_dp import best_chains, grid
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fitting import fitted
from nostall.parallel.planners.ordering import device_order
from nostall.parallel.simulate import simulated_s


@lru_cache(maxsize=1)  # nostall's planner asks again for the same workload
def partitions(work: Workload) -> tuple[tuple[Stage, ...], ...]:
    """The plan with the least bottleneck for each number of stages, and data parallelism."""
    found = best_chains(work, device_order(work.cluster), grid(work), "shared")
    alone = (Stage(0, len(work.profile), tuple(range(len(work.cluster)))),)
    return (*(stages for _, stages in found), alone)


def spp(work: Workload, effort: Effort) -> Plan:
    """The best list-scheduled plan over all numbers of stages.

    Raises :class:`Infeasible` when none fits into memory.
    """
    effort.tell(0.1, "spp: partition and mapping")
    chains = partitions(work)
    best: tuple[float, Plan] | None = None
    for recompute in (False, True) if effort.recompute else (False,):
        for done, stages in enumerate(chains):
            effort.tell(0.5 + 0.5 * done / len(chains), "spp: list scheduling")
            plan = fitted(work, Plan(stages, "list", recompute=recompute))
            if plan is None:
                continue
            seconds = simulated_s(work, plan)
            if best is None or seconds < best[0]:
                best = seconds, plan
        if best is not None:
            return best[1]
    raise Infeasible(
        "no SPP plan fits into memory; use more GPUs, a smaller micro-batch or a smaller "
        "--state-factor"
    )
