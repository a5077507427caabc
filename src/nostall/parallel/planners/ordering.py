"""SPP's recursive device ordering: slow cuts of the GPU graph fall between far parts of the row.

Our reading of arXiv:2204.10562 (only the abstract was at hand): cut the bandwidth graph into two
by a global minimum cut, order each side in the same way, and put one behind the other.
"""

from __future__ import annotations

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from nostall.parallel.cluster import Cluster

Floats = NDArray[np.float64]


def device_order(cluster: Cluster) -> tuple[int, ...]:
    """All GPUs, in the order in which stages take consecutive ones."""
    return tuple(_ordered(list(range(len(cluster))), _weights(cluster)))


def _weights(cluster: Cluster) -> Floats:
    """What each pair gets when all GPUs of a server use its port at a time, bytes/s."""
    server = np.array(cluster.server)
    share = np.array([cluster.ports[s] / len(cluster.servers[s]) for s in server])
    port = np.minimum.outer(share, share)
    return np.where(
        np.equal.outer(server, server), cluster.bandwidth, np.minimum(port, cluster.bandwidth)
    )


def _ordered(gpus: list[int], weights: Floats) -> list[int]:
    if len(gpus) < 3:
        return gpus
    inside = weights[np.ix_(gpus, gpus)]
    off = inside[~np.eye(len(gpus), dtype=bool)]
    if off.min() == off.max():  # any cut is as good as any other
        return gpus
    graph = nx.Graph()
    for i, a in enumerate(gpus):
        for j, b in enumerate(gpus[:i]):
            graph.add_edge(a, b, weight=float(inside[i, j] + inside[j, i]))
    _, (one, other) = nx.stoer_wagner(graph)
    halves = sorted((sorted(one), sorted(other)))
    first, second = _ordered(halves[0], weights), _ordered(halves[1], weights)
    # Of the four ways to join the two rows the one with the fastest link at the seam.
    ways = [(a, b) for a in (first, first[::-1]) for b in (second, second[::-1])]
    left, right = max(ways, key=lambda way: float(weights[way[0][-1], way[1][0]]))
    return [*left, *right]
