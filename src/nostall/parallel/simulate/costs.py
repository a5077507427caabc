"""Modelled costs of a plan's stages, transfers and all-reduces, and the resources they occupy; and
lower bounds of its iteration time in any order: the critical path and the largest load.

Network resources are numbered: two ports per server (sending, receiving) first, then two channels
per stage boundary (forward, backward).  With half duplex only the first of each two is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from nostall.parallel.cluster.route import Route
from nostall.parallel.plan.plan import Plan, Stage
from nostall.parallel.plan.workload import Workload

Loads = tuple[tuple[int, float], ...]
"""(resource, seconds) pairs."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer over a stage boundary, or an all-reduce."""

    seconds: float
    """Time from the start of the transfer until all data has arrived."""
    loads: Loads
    """Resources that must be free when the transfer starts, and the seconds each is occupied."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a plan; times of stages and transfers are those of one micro-batch, in seconds."""

    forward: tuple[float, ...]
    """Per stage."""
    backward: tuple[float, ...]
    """Per stage; without ``weight_gradient`` if the policy splits the backward pass, and with the
    repeated forward pass if the plan re-computes activations."""
    weight_gradient: tuple[float, ...]
    """Per stage; 0 if the policy does not split the backward pass."""
    forward_transfers: tuple[Transfer, ...]
    """Activations over each boundary between stages."""
    backward_transfers: tuple[Transfer, ...]
    """Gradients of activations over each boundary between stages."""
    allreduce: tuple[Transfer, ...]
    """Per stage, once an iteration."""
    worker: tuple[int, ...]
    """Number of the GPU group of each stage; stages with the same GPUs share a worker."""
    resources: int
    """Number of network resources (ports and channels)."""


def costs(workload: Workload, plan: Plan) -> Costs:
    """The costs of a plan; boundaries between stages of one worker cost nothing."""
    forward, backward, weight_gradient = [], [], []
    split_backward = plan.policy == "zero-bubble"
    is_data_parallel = len(plan.stages) == 1
    share_of = workload.data_parallel_share if is_data_parallel else workload.slice_share
    for stage in plan.stages:
        share = share_of(len(stage.gpus))
        f = _between(workload.forward_s, stage) * share
        b = _between(workload.backward_s, stage) * share
        w = _between(workload.weight_gradient_s, stage) * share
        w = min(w, b) if split_backward else 0.0
        forward.append(f)
        backward.append(b - w + (f if plan.recompute else 0.0))
        weight_gradient.append(w)
    forward_transfers, backward_transfers, resources = _boundary_transfers(workload, plan.stages)
    workers: dict[tuple[int, ...], int] = {}
    return Costs(
        tuple(forward),
        tuple(backward),
        tuple(weight_gradient),
        tuple(forward_transfers),
        tuple(backward_transfers),
        tuple(_allreduce(workload, plan, stage) for stage in plan.stages),
        tuple(workers.setdefault(s.gpus, len(workers)) for s in plan.stages),
        resources,
    )


def _between(sums: Sequence[float], stage: Stage) -> float:
    """A stage's part of prefix sums over layers."""
    return sums[stage.end] - sums[stage.first]


def _boundary_transfers(
    workload: Workload, stages: Sequence[Stage]
) -> tuple[list[Transfer], list[Transfer], int]:
    """Forward and backward transfers over each boundary, and the number of network resources."""
    half_duplex = workload.cluster.duplex == "half"
    ports = 2 * len(workload.cluster.ports)
    forward, backward = [], []
    for s in range(len(stages) - 1):
        cut = stages[s].end
        route = workload.route(stages[s].gpus, stages[s + 1].gpus)
        senders, receivers = route.sender_ports, route.receiver_ports
        forward_channel = ports + 2 * s
        backward_channel = forward_channel if half_duplex else forward_channel + 1
        activations, gradients = workload.cut_bytes[cut], workload.gradient_bytes[cut]
        forward.append(
            _transfer(route, activations, senders, receivers, forward_channel, half_duplex)
        )
        backward.append(
            _transfer(route, gradients, receivers, senders, backward_channel, half_duplex)
        )
    return forward, backward, ports + 2 * max(0, len(stages) - 1)


def _transfer(
    route: Route, size: float, senders: Loads, receivers: Loads, channel: int, half_duplex: bool
) -> Transfer:
    """A transfer of ``size`` bytes; ``senders`` and ``receivers`` are (server, seconds per byte).

    With half duplex, a server's sending and receiving port are one resource.
    """
    if size <= 0 or route.s_per_byte <= 0:
        return Transfer(route.latency_s if size > 0 else 0.0, ())
    channel_s = size * route.s_per_byte
    loads: dict[int, float] = {channel: channel_s}
    for server, s_per_byte in senders:
        loads[2 * server] = loads.get(2 * server, 0.0) + size * s_per_byte
    for server, s_per_byte in receivers:
        port = 2 * server + (0 if half_duplex else 1)
        loads[port] = loads.get(port, 0.0) + size * s_per_byte
    # With half duplex, a server that sends and receives in one transfer does one after the other,
    # so its load can be longer than channel_s.
    longest = max(channel_s, *loads.values())
    return Transfer(route.latency_s + longest, tuple(loads.items()))


def _allreduce(workload: Workload, plan: Plan, stage: Stage) -> Transfer:
    """The gradient all-reduce of a stage; of a single stage, only the part that is not hidden."""
    size = _between(workload.parameter_bytes, stage)
    seconds = workload.allreduce_s(stage.gpus, size)
    if seconds > 0 and len(plan.stages) == 1:
        seconds = exposed_allreduce_s(workload, stage.gpus)
    if seconds <= 0:
        return Transfer(0.0, ())
    servers = {workload.cluster.server[g] for g in stage.gpus}
    if len(servers) == 1:
        return Transfer(seconds, ())
    finite = [s for s in sorted(servers) if workload.cluster.ports[s] < float("inf")]
    sides = (0,) if workload.cluster.duplex == "half" else (0, 1)
    return Transfer(seconds, tuple((2 * s + side, seconds) for s in finite for side in sides))


def data_parallel_share(workload: Workload, replicas: int) -> float:
    """Micro-batches that a replica of pure data parallelism runs at a time, at most one.

    With pure data parallelism each replica splits its share of the iteration's samples into
    micro-batches of its own; micro-batches are not sliced over replicas.
    """
    share = workload.data_parallel_share(replicas)
    return max(share, min(1.0, workload.micro_batches * share))


def exposed_allreduce_s(workload: Workload, gpus: tuple[int, ...]) -> float:
    """Seconds of pure data parallelism's all-reduce that the last backward pass does not hide.

    Layer by layer from the last one, a layer's gradients are sent once they are computed and the
    link is free (DAPPLE's "DP + overlap").
    """
    share = data_parallel_share(workload, len(gpus))
    start_s, s_per_byte = workload.allreduce_line(gpus)
    backward_end = workload.backward_s[-1] * share
    link_free = 0.0
    for i in range(len(workload.profile) - 1, -1, -1):
        size = workload.parameter_bytes[i + 1] - workload.parameter_bytes[i]
        if size > 0:
            computed = backward_end - workload.backward_s[i] * share
            link_free = max(link_free, computed) + size * s_per_byte
    return start_s + max(0.0, link_free - backward_end)


def critical_path_s(workload: Workload, plan: Plan) -> float:
    """Seconds of the longest chain of dependent operations of one micro-batch.

    A chain runs forward through all stages, backward to some stage, and ends with the weight
    gradients and the all-reduce of that stage.
    """
    plan_costs = costs(workload, plan)
    path = sum(plan_costs.forward) + sum(t.seconds for t in plan_costs.forward_transfers)
    longest = 0.0
    for s in range(len(plan.stages) - 1, -1, -1):
        path += plan_costs.backward[s]
        end = path + plan_costs.weight_gradient[s] + plan_costs.allreduce[s].seconds
        longest = max(longest, end)
        if s:
            path += plan_costs.backward_transfers[s - 1].seconds
    return longest


def load_bound_s(workload: Workload, plan: Plan) -> float:
    """Seconds that the busiest worker or network resource is occupied in an iteration."""
    return max(_loads(costs(workload, plan), workload.micro_batches))


def _loads(plan_costs: Costs, micro_batches: int) -> list[float]:
    """Seconds that each worker and each network resource is occupied in an iteration."""
    workers = [0.0] * (max(plan_costs.worker) + 1)
    for s, worker in enumerate(plan_costs.worker):
        stage_s = plan_costs.forward[s] + plan_costs.backward[s] + plan_costs.weight_gradient[s]
        workers[worker] += micro_batches * stage_s
    resources: defaultdict[int, float] = defaultdict(float)
    for transfer in (*plan_costs.forward_transfers, *plan_costs.backward_transfers):
        for resource, seconds in transfer.loads:
            resources[resource] += micro_batches * seconds
    for transfer in plan_costs.allreduce:
        for resource, seconds in transfer.loads:
            resources[resource] += seconds
    return [*workers, *resources.values()]
