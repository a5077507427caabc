"""A cluster: GPUs on servers, the latency and bandwidth between each pair, and network ports.

Moving ``n`` bytes from GPU i to GPU j takes ``latency[i, j] + n / bandwidth[i, j]`` seconds if no
other transfer is under way.  All traffic of a server with other servers shares its network port.
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
"""``half``: the two directions of a stage boundary, and of a network port, share its bandwidth one
after the other, as in DAPPLE's formulas; ``full``: they are independent."""


@dataclass(frozen=True, eq=False)
class Cluster:
    """GPUs with the links between them.

    Raises :class:`BadCluster` if there are no GPUs, if the shapes differ, or if a bandwidth or a
    memory size is not above 0 or a latency is below 0.
    """

    name: str
    memory: tuple[float, ...]
    """Bytes of each GPU."""
    server: tuple[int, ...]
    """Number of the server that each GPU is in."""
    latency: Floats
    """Seconds, shape (gpus, gpus)."""
    bandwidth: Floats
    """Bytes/s of a point-to-point message, shape (gpus, gpus)."""
    allreduce_bandwidth: Floats
    """Bytes/s of a link of a ring all-reduce, shape (gpus, gpus)."""
    ports: tuple[float, ...]
    """Bytes/s of each server's network port; infinite if its traffic does not share a port."""
    duplex: Duplex = "full"
    text: str = ""
    """The TOML text that the cluster was read from; empty if it was not read from TOML."""

    def __post_init__(self) -> None:
        n = len(self.memory)
        if n == 0:
            raise BadCluster(f"cluster {self.name!r} has no GPUs; give at least one GPU")
        shapes = {a.shape for a in (self.latency, self.bandwidth, self.allreduce_bandwidth)}
        if len(self.server) != n:
            raise BadCluster(
                f"cluster {self.name!r} has {n} GPUs and the servers of {len(self.server)}; give"
                " one server for each GPU"
            )
        if shapes != {(n, n)}:
            raise BadCluster(
                f"cluster {self.name!r} has {n} GPUs and matrices of shapes {sorted(shapes)}; "
                f"allowed is ({n}, {n}); give one row and one column per GPU"
            )
        off_diagonal = ~np.eye(n, dtype=bool)
        values = np.concatenate(
            [self.bandwidth[off_diagonal], self.allreduce_bandwidth[off_diagonal], self.ports]
        )
        if not (np.all(values > 0) and np.all(self.latency >= 0) and min(self.memory) > 0):
            raise BadCluster(
                f"cluster {self.name!r} has a bandwidth or memory that is not above 0, or a "
                "latency below 0; every pair of GPUs must be connected; correct the file"
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
    def is_symmetric(self) -> bool:
        """Whether exchanging two servers, or two GPUs of one server, gives the same cluster."""
        same_server = np.equal.outer(self.server, self.server)
        off_diagonal = ~np.eye(len(self), dtype=bool)
        return (
            len({len(gpus) for gpus in self.servers}) == 1
            and len(set(self.memory)) == 1
            and all(
                len(np.unique(matrix[block])) <= 1
                for matrix in (self.latency, self.bandwidth, self.allreduce_bandwidth)
                for block in (same_server & off_diagonal, ~same_server)
            )
        )

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """For each GPU, the first GPU of its server with which it is interchangeable."""
        representatives = list(range(len(self)))
        for g in representatives:
            for first in self.servers[self.server[g]]:
                if first == g or (
                    representatives[first] == first and self._are_interchangeable(first, g)
                ):
                    representatives[g] = first
                    break
        return tuple(representatives)

    def _are_interchangeable(self, a: int, b: int) -> bool:
        """Whether exchanging GPUs ``a`` and ``b`` gives the same cluster."""
        exchanged = np.arange(len(self))
        exchanged[[a, b]] = b, a
        return self.memory[a] == self.memory[b] and all(
            np.array_equal(matrix[a, exchanged], matrix[b])
            and np.array_equal(matrix[exchanged, a], matrix[:, b])
            for matrix in (self.latency, self.bandwidth, self.allreduce_bandwidth)
        )

    def allreduce_s(self, gpus: Sequence[int], size: float) -> float:
        """Seconds of a ring all-reduce of ``size`` bytes: 2 (r - 1) steps of size / r bytes.

        The ring visits the GPUs server by server, so only one of its links in each direction uses
        a server's port.
        """
        r = len(gpus)
        if r < 2 or size <= 0:
            return 0.0
        ring = sorted(gpus, key=lambda g: (self.server[g], g))
        a, b = np.array(ring), np.array([*ring[1:], ring[0]])
        slowest = float(self.allreduce_bandwidth[a, b].min())
        return 2 * (r - 1) * (float(self.latency[a, b].max()) + size / r / slowest)


def widest_paths(latency: Floats, bandwidth: Floats) -> tuple[Floats, Floats]:
    """Give each pair of GPUs without a link the latency and bandwidth of its widest path.

    Both matrices are (gpus, gpus); bandwidth 0 means that there is no link.  A path has the
    smallest bandwidth and the sum of the latencies of its links.  The bandwidth that a path takes
    from the links of relaying GPUs is not counted.
    """
    missing = bandwidth == 0
    if not missing.any():
        return latency, bandwidth
    path_latency, path_bandwidth = latency.copy(), bandwidth.copy()
    for relay in range(len(bandwidth)):
        relayed_bandwidth = np.minimum(
            path_bandwidth[:, relay, None], path_bandwidth[None, relay, :]
        )
        relayed_latency = path_latency[:, relay, None] + path_latency[None, relay, :]
        better = relayed_bandwidth > path_bandwidth
        path_bandwidth[better] = relayed_bandwidth[better]
        path_latency[better] = relayed_latency[better]
    return np.where(missing, path_latency, latency), np.where(missing, path_bandwidth, bandwidth)
