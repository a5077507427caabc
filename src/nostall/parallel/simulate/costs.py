"""A plan's costs per stage, boundary and collective, and the resources that each keeps busy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nostall.parallel.cluster.route import Route
from nostall.parallel.plan.plan import Plan, Stage
from nostall.parallel.plan.workload import Workload

Loads = tuple[tuple[int, float], ...]
"""(resource, seconds) pairs."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Takes ``seconds`` once it starts; needs each resource of ``loads`` free to start, and keeps
    it for that resource's own seconds."""

    seconds: float
    loads: Loads


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of one micro-batch in each stage and over each boundary, and of each all-reduce.

    ``backward`` is without ``weight`` when the policy splits the backward pass, and ``weight`` is
    0 when it does not.  ``worker[s]`` numbers the GPU groups.  ``resources`` counts channels and
    ports.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    onward: tuple[Transfer, ...]
    back: tuple[Transfer, ...]
    allreduce: tuple[Transfer, ...]
    worker: tuple[int, ...]
    resources: int


def costs(work: Workload, plan: Plan) -> Costs:
    """What each part of the plan costs; boundaries between stages of one worker cost nothing."""
    forward, backward, weight = [], [], []
    split = plan.policy == "zero-bubble"
    for stage in plan.stages:
        r = len(stage.gpus)
        f = (work.forward[stage.end] - work.forward[stage.first]) / r
        b = (work.backward[stage.end] - work.backward[stage.first]) / r
        w = (work.weight_gradient[stage.end] - work.weight_gradient[stage.first]) / r
        w = min(w, b) if split else 0.0
        forward.append(f)
        backward.append(b - w + (f if plan.recompute else 0.0))
        weight.append(w)
    onward, back, resources = _boundaries(work, plan.stages)
    groups: dict[tuple[int, ...], int] = {}
    return Costs(
        tuple(forward),
        tuple(backward),
        tuple(weight),
        tuple(onward),
        tuple(back),
        tuple(_allreduce(work, plan, stage) for stage in plan.stages),
        tuple(groups.setdefault(s.gpus, len(groups)) for s in plan.stages),
        resources,
    )


def _boundaries(
    work: Workload, stages: Sequence[Stage]
) -> tuple[list[Transfer], list[Transfer], int]:
    """Transfers onward and back over each boundary; ports come first among the resources."""
    half = work.cluster.duplex == "half"
    ports = 2 * len(work.cluster.ports)
    onward, back = [], []
    for s in range(len(stages) - 1):
        cut = stages[s].end
        way = work.route(stages[s].gpus, stages[s + 1].gpus)
        there = ports + 2 * s
        again = there if half else there + 1
        onward.append(_transfer(way, work.cut[cut], way.out, way.into, there, half))
        back.append(_transfer(way, work.cut_back[cut], way.into, way.out, again, half))
    return onward, back, ports + 2 * max(0, len(stages) - 1)


def _transfer(
    way: Route, size: float, out: Loads, into: Loads, channel: int, half: bool
) -> Transfer:
    """``out`` and ``into`` are ports with seconds per byte; with half duplex they are one."""
    if size <= 0 or way.s_per_byte <= 0:
        return Transfer(way.latency_s if size > 0 else 0.0, ())
    busy = size * way.s_per_byte
    loads: dict[int, float] = {channel: busy}
    for server, each in out:
        loads[2 * server] = loads.get(2 * server, 0.0) + size * each
    for server, each in into:
        port = 2 * server + (0 if half else 1)
        loads[port] = loads.get(port, 0.0) + size * each
    # Half duplex: a server that sends and receives in one transfer does so in turns.
    longest = max(busy, *loads.values())
    return Transfer(way.latency_s + longest, tuple(loads.items()))


def _allreduce(work: Workload, plan: Plan, stage: Stage) -> Transfer:
    """The stage's gradient all-reduce; what pure data parallelism cannot hide of it."""
    size = work.parameters[stage.end] - work.parameters[stage.first]
    seconds = work.allreduce_s(stage.gpus, size)
    if seconds > 0 and len(plan.stages) == 1:
        seconds = exposed_allreduce_s(work, stage.gpus)
    if seconds <= 0:
        return Transfer(0.0, ())
    servers = {work.cluster.server[g] for g in stage.gpus}
    if len(servers) == 1:
        return Transfer(seconds, ())
    finite = [s for s in sorted(servers) if work.cluster.ports[s] < float("inf")]
    sides = (0,) if work.cluster.duplex == "half" else (0, 1)
    return Transfer(seconds, tuple((2 * s + side, seconds) for s in finite for side in sides))


def data_parallel_share(work: Workload, replicas: int) -> float:
    """Micro-batches that a replica of pure data parallelism holds at a time, at most one.

    Each replica then runs its share of the samples as micro-batches of its own, not as slices.
    """
    return max(1.0 / replicas, min(1.0, work.micro_batches / replicas))


def exposed_allreduce_s(work: Workload, gpus: tuple[int, ...]) -> float:
    """Seconds of data parallelism's all-reduce that the last backward pass does not hide.

    Layer by layer from the end: a layer's gradients leave when they are there and the link is
    free (DAPPLE's "DP + overlap").
    """
    share = data_parallel_share(work, len(gpus))
    start = work.allreduce_s(gpus, 1e-9)
    per_byte = (work.allreduce_s(gpus, 1e9) - start) * 1e-9
    total = work.backward[-1] * share
    link = 0.0
    for i in range(len(work.profile) - 1, -1, -1):
        size = work.parameters[i + 1] - work.parameters[i]
        if size > 0:
            there = total - work.backward[i] * share
            link = max(link, there) + size * per_byte
    return start + max(0.0, link - total)
