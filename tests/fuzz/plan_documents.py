"""Sound inputs of the readers of profiles, clusters and plans, for fuzzing."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import Workload
from nostall.parallel.plan_file import plan_document
from nostall.parallel.profile import save_profile
from tests.fuzz.command_line import Original
from tests.unit.parallel.cases import profile, servers, straight
from tests.unit.parallel.cluster.test_topology import NVSWITCH, PCIE
from tests.unit.parallel.profile.test_profile import GRAPH

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"
CLUSTER, PROFILE = "cluster.toml", "profile.json"
"""Names of the files that accompany a profile and a cluster."""
SMALL_CLUSTER = """\
name = "two servers"
duplex = "half"

[[servers]]
count = 2
gpus = 2
memory_gib = 16
link = { bandwidth_gbytes = 100, latency_us = 5.5 }

[network]
bandwidth_gbytes = 10
shared = true

[[links]]
gpus = [0, 3]
bandwidth_gbytes = 25
allreduce_gbytes = 20
"""


def _profile_json() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / PROFILE
        save_profile(profile(6, boundary=1e6, parameters=1e8), path)
        return path.read_bytes()


def profiles() -> Sequence[Original]:
    """Profiles as JSON and as PipeDream's graph text, each with a cluster beside it."""
    companions = {CLUSTER: SMALL_CLUSTER.encode()}
    return (
        Original(PROFILE, _profile_json(), companions),
        Original("graph-pbs-2.txt", GRAPH.encode(), companions),
    )


def clusters() -> Sequence[Original]:
    """Cluster files and outputs of ``nvidia-smi topo -m``, each with a profile beside it."""
    companions = {PROFILE: _profile_json()}
    examples = sorted(CLUSTERS.glob("*.toml"))
    return (
        Original(CLUSTER, SMALL_CLUSTER.encode(), companions),
        *(Original(path.name, path.read_bytes(), companions) for path in examples),
        Original("nvswitch.txt", NVSWITCH.encode(), companions),
        Original("pcie.txt", PCIE.encode(), companions),
    )


def plans() -> Sequence[Original]:
    """Plan files of two and of four stages."""
    originals = []
    for ends, policy in (((3, 6), "1f1b"), ((1, 3, 5, 6), "gpipe")):
        workload = Workload(profile(6, boundary=1e6), servers(2, 2), 16, 2)
        evaluation = evaluate_plan(workload, straight(ends, policy), "even")
        document = plan_document(evaluation, "absent.py:build")
        originals.append(Original(f"{policy}.json", json.dumps(document).encode()))
    return originals
