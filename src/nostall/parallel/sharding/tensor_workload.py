"""A measured workload with tensor parallelism in groups of GPUs, for predictions of a user's plan.

The measured seconds of all layers get the modelled share that operators take on one of the group's
GPUs, by Megatron's rule for names, and the collectives' modelled seconds by their time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from nostall.parallel.cluster import Cluster
from nostall.parallel.errors import BadPlan
from nostall.parallel.module.job import Job
from nostall.parallel.plan import Workload
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.memory import ADAM_STATE_FACTOR
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.cost.timeline import timeline
from nostall.parallel.sharding.graph import Assignment, output_placements, replicated
from nostall.parallel.sharding.placements import is_sharded
from nostall.parallel.sharding.planners.rules import RULES
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule, priced_plan

RULE = "tensor-parallel"


def tensor_workload(
    workload: Workload, job: Job, rates: DeviceRates, group: int, samples: int
) -> Workload:
    """The workload on a cluster whose GPUs are groups of ``group`` consecutive ones.

    ``samples`` are those of a replica's micro-batch.  Raises :class:`BadPlan` if the GPUs do not
    form such groups, or if no parameter has a name and a size by which it is cut.
    """
    cluster = workload.cluster
    if len(cluster) % group:
        raise BadPlan(
            f"--mine has tp={group} and the cluster {len(cluster)} GPUs; give a divisor of these"
        )
    graph = capture(job, samples, (group,)).graph
    first = _part(cluster, range(group), 1)
    prices = Prices(graph, ClusterMesh(first, (group,)), rates)
    plan = plan_by_rule(prices, RULES[RULE], Options())
    cut = plan is not None and any(
        is_sharded(placement)
        for number in graph.parameters
        for placement in output_placements(
            graph, plan.assignment, graph.operators[number].outputs[0]
        )
    )
    if plan is None or not cut:
        raise BadPlan(
            f"--mine has tp={group}, and no parameter has a name of Megatron's rules (q_proj, "
            "o_proj, up_proj, down_proj, fc1, fc2, ...) and a size that is a multiple of it; "
            "leave tp out"
        )
    whole = priced_plan("one GPU", prices, replicated(graph), ADAM_STATE_FACTOR)
    layers = workload.profile.layers
    share = samples / (workload.profile.batch or samples)  # of the samples that were measured
    forward, backward = (
        _factor(own, alone, share * sum(getattr(layer, name) for layer in layers))
        for own, alone, name in zip(
            _passes(prices, plan.assignment), _passes(prices, whole.assignment),
            ("forward_s", "backward_s"), strict=True,
        )
    )  # fmt: skip
    state = plan.memory.state / whole.memory.state
    kept = _kept(prices, plan.assignment)
    scaled = tuple(
        replace(
            layer,
            forward_s=layer.forward_s * forward,
            backward_s=layer.backward_s * backward,
            parameter_bytes=layer.parameter_bytes * state,
            stored_bytes=None if layer.stored_bytes is None else layer.stored_bytes * kept,
            weight_gradient_s=None,  # which part of the collectives it has is unknown
        )
        for layer in layers
    )
    groups = _part(cluster, range(0, len(cluster), group), group)
    return replace(workload, profile=replace(workload.profile, layers=scaled), cluster=groups)


def _passes(prices: Prices, assignment: Assignment) -> tuple[tuple[float, float], ...]:
    """Modelled seconds of the operators and of the whole pass, forward and backward."""
    whole = timeline(prices, assignment)
    forward = timeline(prices, assignment, forward_only=True)
    return (
        (forward.operators_s, forward.step_s),
        (whole.operators_s - forward.operators_s, whole.step_s - forward.step_s),
    )


def _factor(own: tuple[float, float], alone: tuple[float, float], measured: float) -> float:
    """How many times the measured seconds of a pass, of as many samples, it takes in a group."""
    operators = own[0] / alone[0] if alone[0] > 0 else 1.0
    sent = max(0.0, own[1] - own[0])
    return operators + (sent / measured if measured > 0 else 0.0)


def _kept(prices: Prices, assignment: Assignment) -> float:
    """Share of the stored activations that one GPU of a group keeps."""
    graph = prices.graph
    whole = sum(graph.tensors[t].elements * graph.tensors[t].itemsize for t in graph.saved_tensors)
    own = sum(
        prices.local_bytes(graph.tensors[t], output_placements(graph, assignment, t)) or 0.0
        for t in graph.saved_tensors
    )
    return own / whole if whole else 1.0


def _part(cluster: Cluster, gpus: Sequence[int], copies: int) -> Cluster:
    """Some GPUs of a cluster; each port carries the messages of ``copies`` GPUs for one."""
    own = np.ix_(gpus, gpus)
    servers = sorted({cluster.server[g] for g in gpus})
    return Cluster(
        cluster.name,
        tuple(cluster.memory[g] for g in gpus),
        tuple(servers.index(cluster.server[g]) for g in gpus),
        cluster.latency[own],
        cluster.bandwidth[own],
        cluster.allreduce_bandwidth[own],
        tuple(cluster.ports[server] / copies for server in servers),
        cluster.duplex,
    )
