"""Converter from the output of ``nvidia-smi topo -m`` to a cluster file with one server.

The matrix names the kind of each link, not its speed.  Bandwidths and latencies are *assumed* from
the kind of link (NVIDIA's figures) and are written to the cluster file, where a user can correct
them.
"""

from __future__ import annotations

import json
import math
import re

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
