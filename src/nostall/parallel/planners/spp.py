"""SPP (arXiv:2204.10562): device ordering, partition and mapping, then list scheduling.

Only the abstract was available; how the parts work is an interpretation
(docs/explanation/pipeline-planners.md).  Recursive minimum cuts put the devices in a row, dynamic
programming finds the least bottleneck for every number of stages, and a greedy list order runs each
of these plans in the simulator, which decides.  Greedy orders finish within (M + 4 S - 4) times the
largest load per micro-batch; tests check this bound.
"""

from __future__ import annotations

from functools import lru_cache

from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.chain_dp import best_partitions, search_grid
from nostall.parallel.planners.device_order import device_order
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fastest import fastest, fastest_or_cheap
from nostall.parallel.planners.memory_fit import fit_to_memory


@lru_cache(maxsize=1)  # nostall's planner needs the partitions of the same workload again
def partitions(workload: Workload, effort: Effort) -> tuple[tuple[Stage, ...], ...]:
    """The stages with the least bottleneck for each number of stages, then data parallelism."""
    order = device_order(workload.cluster)
    partitions = best_partitions(workload, order, search_grid(workload), "shared", effort)
    data_parallel = (Stage(0, len(workload.profile), tuple(range(len(workload.cluster)))),)
    return (*(stages for _, stages in partitions), data_parallel)


def spp(workload: Workload, effort: Effort) -> Plan:
    """The list-scheduled plan with the least simulated time over all numbers of stages.

    A cheap plan (:mod:`.fastest`) that is faster is returned instead.  Raises :class:`Infeasible`
    if no plan fits into memory.
    """
    effort.report_progress(0.1, "spp: partition and mapping")
    candidates = partitions(workload, effort)
    best = None
    for recompute in effort.recompute_options:
        effort.report_progress(0.5, "spp: list scheduling")
        plans = (Plan(stages, "list", recompute=recompute) for stages in candidates)
        fitting = (fit for plan in plans if (fit := fit_to_memory(workload, plan)) is not None)
        best = best or fastest(workload, fitting, effort)
    if (plan := fastest_or_cheap(workload, best, effort)) is not None:
        return plan
    raise effort.no_plan(
        "no SPP plan fits into memory; use more GPUs, a smaller micro-batch or a smaller "
        "--state-factor"
    )
