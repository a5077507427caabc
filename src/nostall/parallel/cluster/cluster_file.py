"""Reader of cluster files: servers, the network between them, and exceptional links, as TOML.

Examples are in ``examples/clusters``.  Bandwidths are in GB/s (1e9 bytes/s), latencies in
microseconds, memory in GiB.

Converter from the output of ``nvidia-smi topo -m`` to a cluster file with one server.

The matrix names the kind of each link, not its speed.  Bandwidths and latencies are *assumed* from
the kind of link (NVIDIA's figures) and are written to the cluster file, where a user can correct
them.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall.core.validation import parse_toml
from nostall.parallel.cluster.cluster import Cluster, Duplex, Floats, widest_paths
from nostall.parallel.errors import BadCluster

NVLINK_GBYTES = 25.0
"""GB/s per link and direction on NVLink 2 to 4 (Volta to Hopper); Blackwell has 50."""
PCIE_GBYTES = {"PIX": 22.0, "PXB": 20.0, "PHB": 16.0, "NODE": 14.0, "SYS": 10.0}
"""GB/s assumed for PCIe 4.0 x16 through one switch, several switches, a host bridge, several host
bridges of a NUMA node, and the link between sockets."""
NVLINK_LATENCY_US, PCIE_LATENCY_US = 5.0, 10.0
_HEADER = re.compile(r"^\s*GPU0\b")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def is_topology(text: str) -> bool:
    """Whether the text starts with the header line of a topology matrix."""
    lines = [line for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    return bool(lines) and _HEADER.match(lines[0]) is not None


def topology_toml(text: str, name: str, memory_gib: float | None) -> str:
    """Convert a topology matrix to the TOML text of a cluster file.

    ``memory_gib`` is the memory of each GPU.  Raises :class:`BadCluster` if it is missing, or if
    the matrix is incomplete or has an unknown kind of link.
    """
    if memory_gib is None or not 0 < memory_gib < math.inf:
        raise BadCluster(
            f"{name}: a topology does not contain the memory of a GPU (got {memory_gib}); give "
            "--gpu-memory GIB, a number above 0"
        )
    kinds = _parse_matrix(text, name)
    count = len(kinds)
    lines = [
        "# From nvidia-smi topo -m; bandwidths are assumed from the kinds of links.",
        f"name = {json.dumps(name)}",
        "[[servers]]",
        f"gpus = {count}",
        f"memory_gib = {memory_gib}",
    ]
    for a in range(count):
        for b in range(a + 1, count):
            bandwidth, latency = _assumed_speed(kinds[a][b], f"{name}: GPU{a} to GPU{b}")
            lines += [
                "[[links]]",
                f"gpus = [{a}, {b}]  # {kinds[a][b]}",
                f"bandwidth_gbytes = {bandwidth}",
                f"latency_us = {latency}",
            ]
    return "\n".join(lines) + "\n"


def _parse_matrix(text: str, name: str) -> list[list[str]]:
    """Kinds of links between GPUs, row by row, without the columns of NICs and affinities."""
    lines = [line for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    columns = re.findall(r"GPU\d+", lines[0].partition("CPU")[0].partition("NIC")[0])
    rows: dict[int, list[str]] = {}
    for line in lines[1:]:
        words = line.split()
        if re.fullmatch(r"GPU\d{1,4}", words[0]):
            rows[int(words[0][3:])] = words[1 : 1 + len(columns)]
    count = len(columns)
    if sorted(rows) != list(range(count)) or any(len(row) != count for row in rows.values()):
        raise BadCluster(
            f"{name}: the matrix has {count} columns and {len(rows)} rows of GPUs; give the whole "
            "output of nvidia-smi topo -m"
        )
    return [rows[g] for g in range(count)]


def _assumed_speed(kind: str, link: str) -> tuple[float, float]:
    """Assumed bandwidth (GB/s) and latency (microseconds) of a kind of link."""
    if match := re.fullmatch(r"NV([1-9]\d{0,2})", kind):
        return NVLINK_GBYTES * int(match[1]), NVLINK_LATENCY_US
    if kind in PCIE_GBYTES:
        return PCIE_GBYTES[kind], PCIE_LATENCY_US
    raise BadCluster(
        f"{link}: the kind of link {kind[:40]!r} is unknown; allowed are NV1 to NV999 and "
        f"{', '.join(PCIE_GBYTES)}; give the output of nvidia-smi topo -m"
    )


MAX_GPUS = 1024
MAX_RELAYED_GPUS = 512
"""GPUs of a cluster that has pairs without a link: the search for paths is cubic."""
# Bounds far outside real hardware: times of transfers stay finite, and planners compare them.
_Bandwidth = Annotated[float, Field(ge=1e-6, le=1e15, allow_inf_nan=False)]
_Memory = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
_Latency = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class _StrictRecord(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Link(_StrictRecord):
    bandwidth_gbytes: _Bandwidth
    allreduce_gbytes: _Bandwidth | None = None
    """Bandwidth of this link in a ring all-reduce; by default ``bandwidth_gbytes``."""
    latency_us: _Latency = 0.0


class _Network(_Link):
    shared: bool = True
    """Whether all traffic of a server with other servers shares one port."""


class _Servers(_StrictRecord):
    count: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS, strict=True)]
    memory_gib: _Memory
    link: _Link | None = None


class _PairLink(_Link):
    gpus: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]


class _ClusterRecord(_StrictRecord):
    name: str
    duplex: Duplex = "full"
    servers: Annotated[list[_Servers], Field(min_length=1)]
    network: _Network | None = None
    links: list[_PairLink] = []


def load_cluster(path: Path, memory_gib: float | None = None) -> Cluster:
    """Read a cluster from a TOML file or from a file with the output of ``nvidia-smi topo -m``.

    ``memory_gib`` is the memory of each GPU and is used only for the output of ``nvidia-smi``,
    which does not contain it.  Raises :class:`BadCluster` if the file cannot be read or is invalid.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadCluster(
            f"cannot read {path}: {error.strerror}; give the path of a cluster file"
        ) from error
    except UnicodeDecodeError as error:
        raise BadCluster(f"{path} is not UTF-8 text; give a TOML file") from error
    if is_topology(text):
        text = topology_toml(text, path.stem, memory_gib)
    elif memory_gib is not None:
        raise BadCluster(
            f"--gpu-memory is for the output of nvidia-smi, and {path} states the memory of its "
            "GPUs; leave the option out, or change memory_gib in the file"
        )
    return parse_cluster(text, str(path))


def parse_cluster(text: str, source: str = "the cluster") -> Cluster:
    """Parse TOML text into a cluster; raises :class:`BadCluster` with the name of a bad field.

    ``source`` is the name of the text in error messages.
    """
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise BadCluster(f"{source} is not TOML: {error}; see examples/clusters") from error
    try:
        record = _ClusterRecord.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise BadCluster(
            f"{source}: {field}: {first['msg']} (got {str(first['input'])[:40]}); see "
            "examples/clusters"
        ) from error
    return _build(record, source, text)


def _build(record: _ClusterRecord, source: str, text: str) -> Cluster:
    servers = [group for group in record.servers for _ in range(group.count)]
    server_of_gpu = tuple(s for s, server in enumerate(servers) for _ in range(server.gpus))
    n = len(server_of_gpu)
    if n > MAX_GPUS:
        raise BadCluster(f"{source} has {n} GPUs; allowed are up to {MAX_GPUS}")
    latency, bandwidth, allreduce = _link_matrices(record, servers, n, source)
    if n > MAX_RELAYED_GPUS and (bandwidth == 0).any():
        raise BadCluster(
            f"{source} has {n} GPUs, and not every pair of them is linked; allowed are up to "
            f"{MAX_RELAYED_GPUS} GPUs without direct links; give a [network], and a link inside "
            "the servers"
        )
    path_latency, path_bandwidth = widest_paths(latency, bandwidth)
    _, path_allreduce = widest_paths(latency, allreduce)
    unreachable = [j for j in range(n) if j and path_bandwidth[0, j] == 0]
    if unreachable:
        raise BadCluster(
            f"{source}: GPU 0 cannot reach GPU {unreachable[0]}; all GPUs must be connected; give "
            "a [network], a link inside the servers, or [[links]]"
        )
    port = record.network.bandwidth_gbytes * 1e9 if record.network else np.inf
    is_shared = record.network is not None and record.network.shared and len(servers) > 1
    for matrix in (path_latency, path_bandwidth, path_allreduce):
        matrix.setflags(write=False)
    return Cluster(
        name=record.name,
        memory=tuple(server.memory_gib * 2**30 for server in servers for _ in range(server.gpus)),
        server=server_of_gpu,
        latency=path_latency,
        bandwidth=path_bandwidth,
        allreduce_bandwidth=path_allreduce,
        ports=tuple(port if is_shared else np.inf for _ in servers),
        duplex=record.duplex,
        text=text,
    )


def _link_matrices(
    record: _ClusterRecord, servers: list[_Servers], n: int, source: str
) -> tuple[Floats, Floats, Floats]:
    """Latency, bandwidth and all-reduce bandwidth of the links; bandwidth 0 without a link.

    The network is set first, then links inside servers, then ``[[links]]``; later entries replace
    earlier ones.
    """
    matrices = (np.zeros((n, n)), np.zeros((n, n)), np.zeros((n, n)))
    if record.network:
        _set_link(matrices, slice(None), slice(None), record.network)
    first = 0
    for server in servers:
        inside = slice(first, first + server.gpus)
        first += server.gpus
        if server.link:
            _set_link(matrices, inside, inside, server.link)
    for pair in record.links:
        a, b = pair.gpus
        if max(a, b) >= n or a == b:
            raise BadCluster(
                f"{source}: links: gpus = [{a}, {b}]; allowed are two different GPUs from 0 to "
                f"{n - 1}"
            )
        for i, j in ((a, b), (b, a)):
            _set_link(matrices, slice(i, i + 1), slice(j, j + 1), pair)
    return matrices


def _set_link(
    matrices: tuple[Floats, Floats, Floats], rows: slice, columns: slice, link: _Link
) -> None:
    latency, bandwidth, allreduce = matrices
    latency[rows, columns] = link.latency_us * 1e-6
    bandwidth[rows, columns] = link.bandwidth_gbytes * 1e9
    allreduce[rows, columns] = (link.allreduce_gbytes or link.bandwidth_gbytes) * 1e9
