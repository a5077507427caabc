"""Clusters as TOML files: servers, the network between them, and links that differ.

See ``examples/clusters``.  Bandwidths are in GB/s (1e9 bytes/s), latencies in microseconds,
memory in GiB.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall.parallel.cluster.cluster import Cluster, Duplex, Floats, widest_paths
from nostall.parallel.cluster.topology import is_topology, topology_toml
from nostall.parallel.errors import BadCluster

MOST_GPUS = 4096
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Link(_Strict):
    bandwidth_gbytes: _Positive
    allreduce_gbytes: _Positive | None = None
    latency_us: _NotNegative = 0.0


class _Network(_Link):
    shared: bool = True
    """Whether all traffic of a server goes through one port."""


class _Servers(_Strict):
    count: Annotated[int, Field(ge=1, le=MOST_GPUS)] = 1
    gpus: Annotated[int, Field(ge=1, le=MOST_GPUS)]
    memory_gib: _Positive
    link: _Link | None = None


class _Pair(_Link):
    gpus: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


class _ClusterFile(_Strict):
    name: str
    duplex: Duplex = "full"
    servers: Annotated[list[_Servers], Field(min_length=1)]
    network: _Network | None = None
    links: list[_Pair] = []


def load_cluster(path: Path, memory_gib: float | None = None) -> Cluster:
    """Read a TOML file, or what ``nvidia-smi topo -m`` printed (``memory_gib`` of each GPU).

    Raises :class:`BadCluster`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadCluster(f"cannot read {path}: {error.strerror}; give a cluster file") from error
    except UnicodeDecodeError as error:
        raise BadCluster(f"{path} is not text; give a TOML file") from error
    if is_topology(text):
        text = topology_toml(text, path.stem, memory_gib)
    return parse_cluster(text, str(path))


def parse_cluster(text: str, where: str = "the cluster") -> Cluster:
    """A cluster from TOML text; raises :class:`BadCluster` naming the field."""
    try:
        record = _ClusterFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise BadCluster(f"{where} is not TOML: {error}; see examples/clusters") from error
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadCluster(
            f"{where}: {field}: {first['msg']} (got {str(first['input'])[:40]}); see "
            "examples/clusters"
        ) from error
    return _build(record, where, text)


def _build(record: _ClusterFile, where: str, text: str) -> Cluster:
    kinds = [kind for kind in record.servers for _ in range(kind.count)]
    server = tuple(s for s, kind in enumerate(kinds) for _ in range(kind.gpus))
    n = len(server)
    if n > MOST_GPUS:
        raise BadCluster(f"{where} has {n} GPUs; allowed are up to {MOST_GPUS}")
    latency, bandwidth, reduce = np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n))
    matrices = (latency, bandwidth, reduce)
    if record.network:
        _set(matrices, slice(None), slice(None), record.network)
    at = 0
    for kind in kinds:
        inside = slice(at, at + kind.gpus)
        at += kind.gpus
        if kind.link:
            _set(matrices, inside, inside, kind.link)
    for pair in record.links:
        a, b = pair.gpus
        if max(a, b) >= n or a == b:
            raise BadCluster(
                f"{where}: links: gpus = [{a}, {b}]; allowed are two different GPUs from 0 to "
                f"{n - 1}"
            )
        for i, j in ((a, b), (b, a)):
            _set(matrices, slice(i, i + 1), slice(j, j + 1), pair)
    hops, widths = widest_paths(latency, bandwidth)
    _, reduces = widest_paths(latency, reduce)
    apart = [j for j in range(n) if j and widths[0, j] == 0]
    if apart:
        raise BadCluster(
            f"{where}: GPU 0 cannot reach GPU {apart[0]}; all GPUs must be connected; give a "
            "[network], a link inside the servers, or [[links]]"
        )
    port = record.network.bandwidth_gbytes * 1e9 if record.network else np.inf
    shared = record.network is not None and record.network.shared and len(kinds) > 1
    ports = tuple(port if shared else np.inf for _ in kinds)
    memory = tuple(kind.memory_gib * 2**30 for kind in kinds for _ in range(kind.gpus))
    for matrix in (hops, widths, reduces):
        matrix.setflags(write=False)
    return Cluster(record.name, memory, server, hops, widths, reduces, ports, record.duplex, text)


def _set(matrices: tuple[Floats, Floats, Floats], rows: slice, columns: slice, link: _Link) -> None:
    latency, bandwidth, reduce = matrices
    latency[rows, columns] = link.latency_us * 1e-6
    bandwidth[rows, columns] = link.bandwidth_gbytes * 1e9
    reduce[rows, columns] = (link.allreduce_gbytes or link.bandwidth_gbytes) * 1e9
