"""Cost of sending a micro-batch's tensors from the replicas of one stage to those of the next.

The micro-batch is sliced evenly on both sides (DAPPLE, figure 8): replica i of k holds the part
[i/k, (i+1)/k) and sends to each replica of the next stage the overlap of their two parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.cluster.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Route:
    """Cost of one stage boundary: ``latency_s + bytes * s_per_byte``, and the ports it occupies."""

    latency_s: float
    s_per_byte: float
    """Seconds per byte of the micro-batch over the slowest GPU link or port."""
    sender_ports: tuple[tuple[int, float], ...]
    """(server, seconds per byte) of the ports that send in the forward direction; the backward
    direction uses the ports the other way round."""
    receiver_ports: tuple[tuple[int, float], ...]
    """(server, seconds per byte) of the ports that receive in the forward direction."""


def route(cluster: Cluster, source: tuple[int, ...], target: tuple[int, ...]) -> Route:
    """The route between two groups of GPUs; a GPU in both groups keeps its part in place."""
    part = _overlaps(len(source), len(target))
    a, b = np.array(source), np.array(target)
    moved = np.where(a[:, None] == b[None, :], 0.0, part)
    if not moved.any():
        return Route(0.0, 0.0, (), ())
    used = moved > 0
    # The diagonal of the bandwidth matrix is arbitrary (0, too), and nothing is sent there.
    bandwidth = np.where(used, cluster.bandwidth[np.ix_(a, b)], 1.0)
    seconds = np.where(used, moved / bandwidth, 0.0)
    slowest = max(float(seconds.sum(axis=1).max()), float(seconds.sum(axis=0).max()))
    latency = float(cluster.latency[np.ix_(a, b)][used].max())
    servers = np.array(cluster.server)
    between_servers = servers[a][:, None] != servers[b][None, :]
    crossing = np.where(between_servers, moved, 0.0)
    sender_ports = _port_loads(cluster, servers[a], crossing.sum(axis=1))
    receiver_ports = _port_loads(cluster, servers[b], crossing.sum(axis=0))
    slowest = max([slowest, *(load for _, load in (*sender_ports, *receiver_ports))])
    return Route(latency, slowest, sender_ports, receiver_ports)


def _port_loads(
    cluster: Cluster, server: NDArray[np.int64], parts: NDArray[np.float64]
) -> tuple[tuple[int, float], ...]:
    loads = np.bincount(server, weights=parts, minlength=len(cluster.ports))
    return tuple(
        (s, float(load) / cluster.ports[s])
        for s, load in enumerate(loads)
        if load > 0 and np.isfinite(cluster.ports[s])
    )


@lru_cache(maxsize=256)  # some of the largest have megabytes
def _overlaps(k: int, n: int) -> NDArray[np.float64]:
    """Share of the micro-batch that replica i of k and replica j of n both hold, shape (k, n)."""
    i, j = np.arange(k)[:, None], np.arange(n)[None, :]
    overlap = np.minimum((i + 1) / k, (j + 1) / n) - np.maximum(i / k, j / n)
    return np.asarray(np.maximum(0.0, overlap), dtype=np.float64)
