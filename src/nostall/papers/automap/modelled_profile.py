"""Profile of a model whose times are modelled, for Auto-MAP's pipeline explorer.

The operator costs of the cost model take the place of a measured profile, as the paper's profiler
takes an HLO instruction's.  The time between two possible cuts is divided equally among the layers
there.
"""

from __future__ import annotations

from itertools import pairwise

from nostall.parallel.cluster import Cluster
from nostall.parallel.module.model import Model
from nostall.parallel.module.profiler import profile_tensors
from nostall.parallel.profile import Layer, Profile
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.hybrid.planner import first_gpus, sends_its_own
from nostall.parallel.sharding.hybrid.run import capture_stage
from nostall.parallel.sharding.hybrid.signature import signature


def modelled_profile(model: Model, cluster: Cluster, rates: DeviceRates, samples: int) -> Profile:
    """The profile of a micro-batch of ``samples`` samples on one GPU of the cluster."""
    ends = [0, *(c for c in range(1, len(model)) if sends_its_own(model, c)), len(model)]
    known: dict[object, tuple[float, float, float]] = {}
    layers: list[Layer] = []
    charged: set[int] = set()
    for first, end in pairwise(ends):
        key = signature(model, first, end, samples)
        if key not in known:
            known[key] = _times(model, first, end, cluster, rates, samples)
        forward, backward, stored = (value / (end - first) for value in known[key])
        for number in range(first, end):
            own = [p for p in model.stage_parameters(number, number + 1) if id(p) not in charged]
            charged |= {id(p) for p in own}
            size = float(sum(p.numel() * p.element_size() for p in own))
            layers.append(Layer(model.layer_names[number], forward, backward, size, stored))
    title = type(model.job.module).__name__
    return Profile(title, tuple(layers), profile_tensors(model, samples), samples)


def _times(
    model: Model, first: int, end: int, cluster: Cluster, rates: DeviceRates, samples: int
) -> tuple[float, float, float]:
    """Seconds of the forward and of the backward pass, and bytes of the stored activations."""
    graph = capture_stage(model, first, end, samples, 1).step.graph
    prices = Prices(graph, ClusterMesh(first_gpus(cluster, 1), (1,)), rates)
    whole = replicated(graph)
    seconds = [prices.operators_s(whole, forward=is_forward) for is_forward in (True, False)]
    tensors = [graph.tensors[t] for t in graph.saved_tensors]
    stored = float(sum(tensor.elements * tensor.itemsize for tensor in tensors))
    return seconds[0], seconds[1], stored
