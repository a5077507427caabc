"""A cluster as a device mesh, and the time of collectives along each mesh dimension.

GPU numbers are in row order: the last mesh dimension has consecutive GPUs.  All groups along a mesh
dimension call a collective at the same time, so they share the network ports of the servers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from nostall.core.text.plurals import pluralize
from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.sharding.placements import COLLECTIVES, Collective

MAX_DIMENSIONS = 2
_RING_ROUNDS: dict[Collective, int] = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often each byte goes around the ring."""


@dataclass(frozen=True, slots=True)
class CollectiveCost:
    """Seconds of a collective: ``latency_s + bytes * s_per_byte``.

    The bytes are those of the largest local tensor, before or after the collective.
    """

    latency_s: float
    s_per_byte: float

    def seconds(self, size: float) -> float:
        """Seconds for ``size`` bytes."""
        return self.latency_s + size * self.s_per_byte


@dataclass(frozen=True, eq=False)
class ClusterMesh:
    """A cluster whose GPUs form a mesh of ``shape``.

    Raises :class:`BadPlan` if the shape does not have one device per GPU, or if it has more than
    :data:`MAX_DIMENSIONS` dimensions.
    """

    cluster: Cluster
    shape: tuple[int, ...]
    measured: Mapping[tuple[Collective, int], CollectiveCost] = field(default_factory=dict)
    """Measured costs by collective and mesh dimension; they replace those of the links."""

    def __post_init__(self) -> None:
        is_allowed = 1 <= len(self.shape) <= MAX_DIMENSIONS and min(self.shape) >= 1
        if not is_allowed or math.prod(self.shape) != len(self.cluster):
            raise BadPlan(
                f"mesh {mesh_text(self.shape)} on {pluralize(len(self.cluster), 'GPU')}: allowed "
                f"are one or two numbers whose product is {len(self.cluster)}, the GPUs of the "
                "cluster"
            )

    def groups(self, mesh_dim: int) -> list[tuple[int, ...]]:
        """The GPUs of each line of devices along a mesh dimension."""
        gpus = np.arange(len(self.cluster)).reshape(self.shape)
        lines = np.moveaxis(gpus, mesh_dim, -1).reshape(-1, self.shape[mesh_dim])
        return [tuple(map(int, line)) for line in lines]

    @cached_property
    def _costs(self) -> dict[tuple[Collective, int], CollectiveCost]:
        return {
            (kind, mesh_dim): self.measured.get((kind, mesh_dim)) or self._cost(kind, mesh_dim)
            for kind in COLLECTIVES
            for mesh_dim in range(len(self.shape))
        }

    def seconds(self, kind: Collective, mesh_dim: int, size: float) -> float:
        """Seconds of a collective of ``size`` bytes, those of the largest local tensor."""
        return self._costs[kind, mesh_dim].seconds(size)

    def _cost(self, kind: Collective, mesh_dim: int) -> CollectiveCost:
        size = self.shape[mesh_dim]
        if size == 1:
            return CollectiveCost(0.0, 0.0)
        groups = self.groups(mesh_dim)
        if kind == "all-to-all":
            return self._all_to_all(groups, size)
        rounds = _RING_ROUNDS[kind]
        links = [
            (a, b) for group in groups for a, b in zip(group, (*group[1:], group[0]), strict=True)
        ]
        slowest = max(1 / float(self.cluster.allreduce_bandwidth[a, b]) for a, b in links)
        port = self._port_s_per_byte([(a, b, 1.0) for a, b in links])
        latency = max(float(self.cluster.latency[a, b]) for a, b in links)
        steps = rounds * (size - 1)
        return CollectiveCost(steps * latency, steps / size * max(slowest, port))

    def _all_to_all(self, groups: Sequence[tuple[int, ...]], size: int) -> CollectiveCost:
        """Each GPU sends an equal part of its tensor to each other one, one after the other."""
        cluster = self.cluster
        pairs = [(a, b) for group in groups for a in group for b in group if a != b]
        sent: dict[int, float] = {}
        for a, b in pairs:
            sent[a] = sent.get(a, 0.0) + 1 / size / float(cluster.bandwidth[a, b])
        port = self._port_s_per_byte([(a, b, 1 / size) for a, b in pairs])
        latency = max(float(cluster.latency[a, b]) for a, b in pairs)
        return CollectiveCost((size - 1) * latency, max(max(sent.values()), port))

    def _port_s_per_byte(self, transfers: Sequence[tuple[int, int, float]]) -> float:
        """Seconds for which the busiest port is in use, for (source, target, bytes) at once."""
        cluster = self.cluster
        sent, received = ([0.0] * len(cluster.ports) for _ in range(2))
        for a, b, size in transfers:
            if cluster.server[a] != cluster.server[b]:
                sent[cluster.server[a]] += size
                received[cluster.server[b]] += size
        loads = (
            (out + back if cluster.duplex == "half" else max(out, back)) / port
            for out, back, port in zip(sent, received, cluster.ports, strict=True)
        )
        return max(loads, default=0.0)


def mesh_text(shape: Sequence[int]) -> str:
    """A shape as users write it: ``2x8``."""
    return "x".join(map(str, shape))


def default_shapes(cluster: Cluster) -> list[tuple[int, ...]]:
    """All GPUs in one dimension and, for servers of equal size, servers by GPUs."""
    sizes = {len(gpus) for gpus in cluster.servers}
    servers = len(cluster.servers)
    shapes: list[tuple[int, ...]] = [(len(cluster),)]
    if servers > 1 and len(sizes) == 1 and sizes != {1}:
        shapes.append((servers, *sizes))
    return shapes
