"""Clusters from the output of ``nvidia-smi topo -m``."""

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


def load(tmp_path: Path, text: str, memory: float | None = 80) -> Cluster:
    path = tmp_path / "node 7.txt"
    path.write_text(text)
    return load_cluster(path, memory)


def test_each_kind_of_link_has_its_assumed_bandwidth(tmp_path: Path) -> None:
    nvswitch = load(tmp_path, NVSWITCH)
    assert len(nvswitch) == 4 and nvswitch.is_symmetric
    assert nvswitch.bandwidth[0, 3] == pytest.approx(18 * 25e9)
    assert nvswitch.memory == (80 * 2**30,) * 4
    assert "assumed" in nvswitch.text and nvswitch.name == "node 7"
    pcie = load(tmp_path, PCIE)
    assert len(pcie) == 3 and not pcie.is_symmetric
    assert pcie.bandwidth[0, 1] > pcie.bandwidth[1, 2] == pcie.bandwidth[2, 1] > 0


@pytest.mark.parametrize(
    ("text", "memory", "message"),
    [
        (NVSWITCH, None, "--gpu-memory"),
        (NVSWITCH, -1.0, "--gpu-memory"),
        (NVSWITCH.replace("GPU3\tNV18", "GPX3\tNV18"), 80, "4 columns and 3 rows"),
        (NVSWITCH.replace("NV18", "NV" + "9" * 400), 80, "GPU0 to GPU1: the kind of link 'NV99"),
        (NVSWITCH.replace("GPU3\tNV18", f"GPU{'3' * 5000}\tNV18"), 80, "4 columns and 3 rows"),
        (PCIE.replace("PHB", "ABC"), 80, "GPU0 to GPU1: the kind of link 'ABC' is unknown"),
    ],
)
def test_incomplete_topologies_are_rejected(
    tmp_path: Path, text: str, memory: float | None, message: str
) -> None:
    with pytest.raises(BadCluster, match=message):
        load(tmp_path, text, memory)
