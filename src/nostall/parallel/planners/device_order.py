"""SPP's recursive device ordering: low-bandwidth cuts of the GPU graph separate distant GPUs.

This is an interpretation of arXiv:2204.10562, of which only the abstract was available: split the
bandwidth graph in two by a global minimum cut, order each side in the same way, and concatenate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.cluster import Cluster

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
