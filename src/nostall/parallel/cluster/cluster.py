"""A cluster: GPUs on servers, a link matrix (latency, bandwidth) and the servers' network ports.

Moving ``n`` bytes from GPU i to GPU j takes ``latency[i, j] + n / bandwidth[i, j]`` seconds when
nothing else is under way; all traffic between servers also shares one port per server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.errors import BadCluster

Floats = NDArray[np.float64]
Duplex = Literal["full", "half"]


@dataclass(frozen=True, eq=False)
class Cluster:
    """``gpus`` GPUs; every array is indexed by GPU, ``ports`` by server.

    ``memory`` in bytes; ``latency`` (gpus, gpus) in seconds; ``bandwidth`` and
    ``allreduce_bandwidth`` (gpus, gpus) in bytes/s, point to point and per ring link of a
    collective; ``ports`` in bytes/s, infinite where a server's traffic is not shared.  With
    ``duplex="half"`` both directions of a stage boundary and of a port take turns, which is how
    DAPPLE's formulas count them.  ``text`` is the TOML that the cluster was read from, if any.
    """

    name: str
    memory: tuple[float, ...]
    server: tuple[int, ...]
    latency: Floats
    bandwidth: Floats
    allreduce_bandwidth: Floats
    ports: tuple[float, ...]
    duplex: Duplex = "full"
    text: str = ""

    def __post_init__(self) -> None:
        n = len(self.memory)
        if n == 0:
            raise BadCluster(f"cluster {self.name!r} has no GPUs; at least one is needed")
        shapes = {a.shape for a in (self.latency, self.bandwidth, self.allreduce_bandwidth)}
        if shapes != {(n, n)} or len(self.server) != n:
            raise BadCluster(
                f"cluster {self.name!r} has {n} GPUs and matrices of shapes {sorted(shapes)}; "
                f"allowed is ({n}, {n}); give one row and one column per GPU"
            )
        off = ~np.eye(n, dtype=bool)
        values = np.concatenate([self.bandwidth[off], self.allreduce_bandwidth[off], self.ports])
        if not (np.all(values > 0) and np.all(self.latency >= 0) and min(self.memory) > 0):
            raise BadCluster(
                f"cluster {self.name!r} has a bandwidth or memory that is not above 0, or a "
                "latency below 0; every pair of GPUs must reach each other; correct the file"
            )

    def __len__(self) -> int:
        return len(self.memory)

    @cached_property
    def servers(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each server."""
        return tuple(
            tuple(g for g, s in enumerate(self.server) if s == server)
            for server in range(max(self.server) + 1)
        )

    @cached_property
    def alike(self) -> bool:
        """Whether exchanging two servers, or two GPUs of one, changes nothing."""
        same = np.equal.outer(self.server, self.server)
        off = ~np.eye(len(self), dtype=bool)
        return (
            len({len(gpus) for gpus in self.servers}) == 1
            and len(set(self.memory)) == 1
            and all(
                len(np.unique(matrix[block])) <= 1
                for matrix in (self.latency, self.bandwidth, self.allreduce_bandwidth)
                for block in (same & off, ~same)
            )
        )

    @cached_property
    def twins(self) -> tuple[int, ...]:
        """Of each GPU the first one of its server that it can change places with unnoticed."""
        found = list(range(len(self)))
        for g in found:
            for first in self.servers[self.server[g]]:
                if first == g or (found[first] == first and self._same(first, g)):
                    found[g] = first
                    break
        return tuple(found)

    def _same(self, a: int, b: int) -> bool:
        """Whether the cluster is the same with two GPUs exchanged."""
        order = np.arange(len(self))
        order[[a, b]] = b, a
        return self.memory[a] == self.memory[b] and all(
            np.array_equal(matrix[np.ix_(order, order)], matrix)
            for matrix in (self.latency, self.bandwidth, self.allreduce_bandwidth)
        )

    def allreduce_s(self, gpus: Sequence[int], size: float) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes: 2 (r - 1) steps of size / r bytes.

        The ring visits the GPUs by server, so that each port carries one of its links.
        """
        r = len(gpus)
        if r < 2 or size <= 0:
            return 0.0
        ring = sorted(gpus, key=lambda g: (self.server[g], g))
        a, b = np.array(ring), np.array([*ring[1:], ring[0]])
        slowest = float(self.allreduce_bandwidth[a, b].min())
        return 2 * (r - 1) * (float(self.latency[a, b].max()) + size / r / slowest)


def widest_paths(latency: Floats, bandwidth: Floats) -> tuple[Floats, Floats]:
    """Fill in pairs without a link by the widest path of links, latencies added up.

    Both matrices are (gpus, gpus), bandwidth 0 where there is no link.  What relaying GPUs lose
    is not counted.
    """
    missing = bandwidth == 0
    hops, widths = latency.copy(), bandwidth.copy()
    for via in range(len(bandwidth)):
        through = np.minimum(widths[:, via, None], widths[None, via, :])
        sums = hops[:, via, None] + hops[None, via, :]
        better = through > widths
        widths[better], hops[better] = through[better], sums[better]
    return np.where(missing, hops, latency), np.where(missing, widths, bandwidth)
