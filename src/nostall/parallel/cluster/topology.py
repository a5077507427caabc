"""A server as ``nvidia-smi topo -m`` prints it, turned into a cluster file.

The matrix says how two GPUs are linked, not how fast the link is: bandwidths are *assumed* from
NVIDIA's figures for each kind and stand in the file, where they can be corrected.
"""

from __future__ import annotations

import json
import math
import re

from nostall.parallel.errors import BadCluster

NVLINK_GBYTES = 25.0
"""Per link and direction on NVLink 2 to 4 (Volta to Hopper); Blackwell has 50."""
PATHS = {"PIX": 22.0, "PXB": 20.0, "PHB": 16.0, "NODE": 14.0, "SYS": 10.0}
"""GB/s assumed for PCIe 4.0 x16: one switch, several, a host bridge, a NUMA node, sockets."""
NVLINK_LATENCY_US, PATH_LATENCY_US = 5.0, 10.0
_HEAD = re.compile(r"^\s*GPU0\b")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def is_topology(text: str) -> bool:
    """Whether the text looks like the matrix."""
    lines = [line for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    return bool(lines) and _HEAD.match(lines[0]) is not None


def topology_toml(text: str, name: str, memory_gib: float | None) -> str:
    """A cluster file with one server; raises :class:`BadCluster`."""
    if memory_gib is None or not 0 < memory_gib < math.inf:
        raise BadCluster(
            f"{name}: a topology does not say how much memory a GPU has (got {memory_gib}); give "
            "--gpu-memory GIB, a number above 0"
        )
    kinds = _kinds(text, name)
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
            speed, latency = _link(kinds[a][b], f"{name}: GPU{a} to GPU{b}")
            lines += [
                "[[links]]",
                f"gpus = [{a}, {b}]  # {kinds[a][b]}",
                f"bandwidth_gbytes = {speed}",
                f"latency_us = {latency}",
            ]
    return "\n".join(lines) + "\n"


def _kinds(text: str, name: str) -> list[list[str]]:
    """The GPU part of the matrix, row by row."""
    lines = [line for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    columns = re.findall(r"GPU\d+", lines[0].partition("CPU")[0].partition("NIC")[0])
    rows: dict[int, list[str]] = {}
    for line in lines[1:]:
        words = line.split()
        if re.fullmatch(r"GPU\d+", words[0]):
            rows[int(words[0][3:])] = words[1 : 1 + len(columns)]
    count = len(columns)
    if sorted(rows) != list(range(count)) or any(len(row) != count for row in rows.values()):
        raise BadCluster(
            f"{name}: the matrix has {count} columns and {len(rows)} rows of GPUs; give all that "
            "nvidia-smi topo -m printed"
        )
    return [rows[g] for g in range(count)]


def _link(kind: str, where: str) -> tuple[float, float]:
    if match := re.fullmatch(r"NV(\d+)", kind):
        return NVLINK_GBYTES * int(match[1]), NVLINK_LATENCY_US
    if kind in PATHS:
        return PATHS[kind], PATH_LATENCY_US
    raise BadCluster(f"{where}: {kind!r} is unknown; allowed are NV#, {', '.join(PATHS)}")
