"""What ``nvidia-smi topo -m`` prints, as clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.parallel.cluster import Cluster, load_cluster
from nostall.parallel.errors import BadCluster

NVSWITCH = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-31\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-31\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\t32-63\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\t32-63\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PCIE = """\
\tGPU0\tGPU1\tGPU2\tCPU Affinity\tNUMA Affinity
GPU0\t X \tPHB\tSYS\t0-7\t0
GPU1\tPHB\t X \tSYS\t0-7\t0
GPU2\tSYS\tSYS\t X \t8-15\t1
"""


def read(tmp_path: Path, text: str, memory: float | None = 80) -> Cluster:
    path = tmp_path / "node 7.txt"
    path.write_text(text)
    return load_cluster(path, memory)


def test_nvlinks_and_paths_get_their_kinds_bandwidth(tmp_path: Path) -> None:
    switch = read(tmp_path, NVSWITCH)
    assert len(switch) == 4 and switch.alike
    assert switch.bandwidth[0, 3] == pytest.approx(18 * 25e9)
    assert switch.memory == (80 * 2**30,) * 4
    assert "assumed" in switch.text and switch.name == "node 7"
    bus = read(tmp_path, PCIE)
    assert len(bus) == 3 and not bus.alike
    assert bus.bandwidth[0, 1] > bus.bandwidth[1, 2] == bus.bandwidth[2, 1] > 0


@pytest.mark.parametrize(
    ("text", "memory", "said"),
    [
        (NVSWITCH, None, "--gpu-memory"),
        (NVSWITCH, -1.0, "--gpu-memory"),
        (NVSWITCH.replace("GPU3\tNV18", "GPX3\tNV18"), 80, "4 columns and 3 rows"),
        (PCIE.replace("PHB", "ABC"), 80, "GPU0 to GPU1: 'ABC' is unknown"),
    ],
)
def test_incomplete_topologies_are_refused(
    tmp_path: Path, text: str, memory: float | None, said: str
) -> None:
    with pytest.raises(BadCluster, match=said):
        read(tmp_path, text, memory)
