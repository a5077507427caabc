"""How a tensor gets from the replicas of one stage to those of the next.

The micro-batch is sliced evenly on both sides (DAPPLE, figure 8): replica i of k holds the part
[i/k, (i+1)/k), and sends to each replica of the next stage what their parts have in common.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.cluster.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Route:
    """Cost of one boundary: ``latency_s + bytes * s_per_byte``, and what it keeps busy.

    ``out`` and ``into`` list (server, seconds per byte) of the ports that the forward direction
    loads; the backward direction loads them the other way round.  ``s_per_byte`` is that of the
    slowest GPU link or port.
    """

    latency_s: float
    s_per_byte: float
    out: tuple[tuple[int, float], ...]
    into: tuple[tuple[int, float], ...]


def route(cluster: Cluster, source: tuple[int, ...], target: tuple[int, ...]) -> Route:
    """The route between two groups of GPUs; a GPU in both keeps its part where it is."""
    part = _common_parts(len(source), len(target))
    a, b = np.array(source), np.array(target)
    moved = np.where(a[:, None] == b[None, :], 0.0, part)
    if not moved.any():
        return Route(0.0, 0.0, (), ())
    used = moved > 0
    # A GPU to itself has bandwidth 0 or anything in the matrix; nothing moves there.
    bandwidth = np.where(used, cluster.bandwidth[np.ix_(a, b)], 1.0)
    seconds = np.where(used, moved / bandwidth, 0.0)
    slowest = max(float(seconds.sum(axis=1).max()), float(seconds.sum(axis=0).max()))
    latency = float(cluster.latency[np.ix_(a, b)][used].max())
    servers = np.array(cluster.server)
    apart = servers[a][:, None] != servers[b][None, :]
    crossing = np.where(apart, moved, 0.0)
    out = _ports(cluster, servers[a], crossing.sum(axis=1))
    into = _ports(cluster, servers[b], crossing.sum(axis=0))
    slowest = max([slowest, *(load for _, load in (*out, *into))])
    return Route(latency, slowest, out, into)


def _ports(
    cluster: Cluster, server: NDArray[np.int64], parts: NDArray[np.float64]
) -> tuple[tuple[int, float], ...]:
    loads = np.bincount(server, weights=parts, minlength=len(cluster.ports))
    return tuple(
        (s, float(load) / cluster.ports[s])
        for s, load in enumerate(loads)
        if load > 0 and np.isfinite(cluster.ports[s])
    )


@cache
def _common_parts(k: int, n: int) -> NDArray[np.float64]:
    """Share of the micro-batch that replica i of k and replica j of n both hold, shape (k, n)."""
    i, j = np.arange(k)[:, None], np.arange(n)[None, :]
    common = np.minimum((i + 1) / k, (j + 1) / n) - np.maximum(i / k, j / n)
    return np.asarray(np.maximum(0.0, common), dtype=np.float64)
