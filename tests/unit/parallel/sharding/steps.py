"""Captured steps of narrow models, shared by the tests of shardings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from benchmarks.sharding.models import MODELS, Size

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.module import Job
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates

SAMPLES = 4
RATES = DeviceRates("test", {"float64": 1e8, "float32": 1e8}, 1e9)
"""So slow that narrow models are worth sharding."""


def cluster(gpus: int, servers: int = 1, memory_gib: float = 1.0) -> Cluster:
    return parse_cluster(
        f'name = "test"\n[[servers]]\ncount = {servers}\ngpus = {gpus // servers}\n'
        f"memory_gib = {memory_gib}\nlink = {{ bandwidth_gbytes = 300 }}\n"
        "[network]\nbandwidth_gbytes = 100\n"
    )


@cache
def job(model: str) -> Job:
    torch.manual_seed(0)
    return MODELS[model](Size(layers=1 if model == "t5" else 2))


@cache
def captured(model: str, *mesh: int) -> CapturedStep:
    return capture(job(model), SAMPLES, mesh)


def prices(step: CapturedStep, mesh: Sequence[int]) -> Prices:
    gpus = 1
    for size in mesh:
        gpus *= size
    return Prices(step.graph, ClusterMesh(cluster(gpus), tuple(mesh)), RATES)
