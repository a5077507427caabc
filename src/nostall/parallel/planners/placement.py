"""DAPPLE's three device placement policies for a new stage (section 4.2).

GPUs of a server are interchangeable here: the state is the number of used GPUs of each server, and
within a server GPUs are taken in the order of their numbers.
"""

from __future__ import annotations

from typing import Literal, get_args

from nostall.parallel.cluster import Cluster

PlacementRule = Literal["fresh first", "append first", "scatter first"]
RULES: tuple[PlacementRule, ...] = get_args(PlacementRule)
GpuCounts = tuple[int, ...]
"""Number of GPUs per server."""


def place(cluster: Cluster, used: GpuCounts, count: int, rule: PlacementRule) -> GpuCounts:
    """Number of GPUs of each server that a new stage of ``count`` GPUs gets.

    "fresh first" fills unused servers, "append first" fills partly used ones, "scatter first" takes
    GPUs evenly from the used servers, or from all servers if none is used.  GPUs that the preferred
    servers cannot give are taken from the other servers in order.
    """
    free = [len(gpus) - u for gpus, u in zip(cluster.servers, used, strict=True)]
    fresh = [s for s, u in enumerate(used) if u == 0]
    partly_used = [s for s, u in enumerate(used) if u > 0]
    taken = [0] * len(free)
    if rule == "scatter first":
        for servers in (partly_used, fresh):
            while count and any(free[s] for s in servers):
                for s in servers:
                    if count and free[s]:
                        taken[s], free[s], count = taken[s] + 1, free[s] - 1, count - 1
        return tuple(taken)
    for s in [*fresh, *partly_used] if rule == "fresh first" else [*partly_used, *fresh]:
        taken[s] = min(count, free[s])
        count -= taken[s]
    return tuple(taken)


def placed_gpus(cluster: Cluster, used: GpuCounts, taken: GpuCounts) -> tuple[int, ...]:
    """Numbers of the GPUs that ``taken`` denotes after the first ``used`` of each server."""
    return tuple(
        gpu
        for gpus, u, t in zip(cluster.servers, used, taken, strict=True)
        for gpu in gpus[u : u + t]
    )


def add_counts(used: GpuCounts, taken: GpuCounts) -> GpuCounts:
    """Sums per server."""
    return tuple(u + t for u, t in zip(used, taken, strict=True))
