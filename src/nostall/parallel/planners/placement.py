"""DAPPLE's three ways to give a new stage its GPUs (section 4.2).

What is used already is counted per server: within a server GPUs are taken by number.
"""

from __future__ import annotations

from typing import Literal, get_args

from nostall.parallel.cluster import Cluster

Rule = Literal["fresh first", "append first", "scatter first"]
RULES: tuple[Rule, ...] = get_args(Rule)
Used = tuple[int, ...]
"""GPUs in use, by server."""


def place(cluster: Cluster, used: Used, wanted: int, rule: Rule) -> Used:
    """How many GPUs of each server a stage of ``wanted`` GPUs gets.

    Fresh first fills unused servers, append first partly used ones, scatter first takes evenly
    from the used servers, or from all when none is used.  What the preferred servers cannot give
    comes from the others, in order.
    """
    free = [len(gpus) - u for gpus, u in zip(cluster.servers, used, strict=True)]
    fresh = [s for s, u in enumerate(used) if u == 0]
    partly = [s for s, u in enumerate(used) if u > 0]
    taken = [0] * len(free)
    if rule == "scatter first":
        for servers in (partly, fresh):
            while wanted and any(free[s] for s in servers):
                for s in servers:
                    if wanted and free[s]:
                        taken[s], free[s], wanted = taken[s] + 1, free[s] - 1, wanted - 1
        return tuple(taken)
    for s in [*fresh, *partly] if rule == "fresh first" else [*partly, *fresh]:
        taken[s] = min(wanted, free[s])
        wanted -= taken[s]
    return tuple(taken)


def gpus_of(cluster: Cluster, used: Used, taken: Used) -> tuple[int, ...]:
    """The GPUs that ``taken`` means when ``used`` are gone already."""
    return tuple(
        gpu
        for gpus, u, t in zip(cluster.servers, used, taken, strict=True)
        for gpu in gpus[u : u + t]
    )


def add(used: Used, taken: Used) -> Used:
    """What is used afterwards."""
    return tuple(u + t for u, t in zip(used, taken, strict=True))
