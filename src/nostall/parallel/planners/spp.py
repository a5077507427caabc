"""SPP (arXiv:2204.10562): device ordering, partition and mapping, then list scheduling.

Only the abstract was available; how the parts work is an interpretation
(docs/explanation/pipeline-planners.md).  Recursive minimum cuts put the devices in a row, dynamic
programming finds the least bottleneck for every number of stages, and a greedy list order runs each
of these plans in the simulator, which decides.  Greedy orders finish within (M + 4 S - 4) times the
largest load per micro-batch; tests check this bound.

SPP's recursive device ordering: low-bandwidth cuts of the GPU graph separate distant GPUs.

This is an interpretation of arXiv:2204.10562, of which only the abstract was available: split the
bandwidth graph in two by a global minimum cut, order each side in the same way, and concatenate.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.cluster import Cluster
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.parallel.planners.chain_dp import best_partitions, search_grid
from nostall.parallel.planners.effort import Effort
from nostall.parallel.planners.fastest import fastest, fastest_or_cheap
from nostall.parallel.planners.memory_fit import fit_to_memory

Floats = NDArray[np.float64]
MAX_CUT_GPUS = 128
"""GPUs of the largest graph that is cut, which takes a time cubic in their number."""


def device_order(cluster: Cluster) -> tuple[int, ...]:
    """All GPUs in the order in which stages take consecutive ones.

    More than :data:`MAX_CUT_GPUS` GPUs keep the order of the cluster file, server by server.
    """
    if len(cluster) > MAX_CUT_GPUS:
        return tuple(range(len(cluster)))
    return tuple(_ordered(list(range(len(cluster))), _shared_bandwidths(cluster)))


def _shared_bandwidths(cluster: Cluster) -> Floats:
    """Bytes/s of each pair if all GPUs of a server use its port at the same time, (gpus, gpus)."""
    server = np.array(cluster.server)
    port_share = np.array([cluster.ports[s] / len(cluster.servers[s]) for s in server])
    port = np.minimum.outer(port_share, port_share)
    return np.where(
        np.equal.outer(server, server), cluster.bandwidth, np.minimum(port, cluster.bandwidth)
    )


def _ordered(gpus: list[int], bandwidths: Floats) -> list[int]:
    if len(gpus) < 3:
        return gpus
    inside = bandwidths[np.ix_(gpus, gpus)]
    off_diagonal = inside[~np.eye(len(gpus), dtype=bool)]
    if off_diagonal.min() == off_diagonal.max():  # all pairs are equal, so no cut is better
        return gpus
    import networkx as nx  # slow to import; few clusters need a cut

    graph = nx.Graph()
    for i, a in enumerate(gpus):
        for j, b in enumerate(gpus[:i]):
            graph.add_edge(a, b, weight=float(inside[i, j] + inside[j, i]))
    _, sides = nx.stoer_wagner(graph)
    first, second = (_ordered(side, bandwidths) for side in sorted(map(sorted, sides)))
    # Of the four ways to concatenate the sides, the one with the fastest link between them.
    joins = [(a, b) for a in (first, first[::-1]) for b in (second, second[::-1])]
    head, tail = max(joins, key=lambda join: float(bandwidths[join[0][-1], join[1][0]]))
    return [*head, *tail]


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
