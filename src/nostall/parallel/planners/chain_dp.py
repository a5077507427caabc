"""Partition, replication and mapping onto a row of GPUs, by dynamic programming.

W(l, k, r, i) is the least bottleneck over plans of the first l layers in k stages on the first i
GPUs of the row, with the last stage replicated on the last r of these.  The bottleneck is the
largest load in seconds per micro-batch: of a stage, its compute and its share of the all-reduce; of
a boundary, its transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.parallel.plan import Stage, Workload
from nostall.parallel.planners.cut_positions import candidate_cuts
from nostall.parallel.planners.effort import Effort

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
AllReduceModel = Literal["shared", "hidden"]
"""Model of the all-reduce in a stage's load: ``shared`` adds 1/M of it (synchronous training);
``hidden`` takes the larger of compute and all-reduce (PipeDream, once per micro-batch)."""
MAX_STEPS = 3e8
"""Steps of the inner loop that an exact search may take; a larger search merges layers and tries
powers of two as numbers of replicas."""
ROUTES_PER_CHECK = 4096
"""Routes after which the time limit is checked; up to 16 GPUs have fewer."""
MAX_STAGES = 16
"""Stages in a search that is not exact."""


@dataclass(frozen=True, slots=True)
class SearchGrid:
    """Values over which the dynamic programming searches."""

    cuts: tuple[int, ...]
    """Positions at which a stage may begin."""
    replicas: tuple[int, ...]
    """Numbers of GPUs that a stage may have."""
    max_stages: int


class StageArrays(NamedTuple):
    """The workload at the candidate cuts; all but ``memory`` have shape (cuts + 1,)."""

    time: Floats
    """Seconds of forward and backward passes of the layers before each cut, on one GPU."""
    parameters: Floats
    """Bytes of parameters of the layers before each cut."""
    stored: Floats
    """Bytes that a micro-batch keeps in the layers before each cut."""
    cut: Floats
    """Bytes sent forward over each cut."""
    gradient: Floats
    """Bytes sent back over each cut."""
    memory: Floats
    """Bytes of each GPU of the row, shape (gpus,)."""


class LinkArrays(NamedTuple):
    """Communication costs for consecutive GPUs of the row; r and q are indices of replica counts.

    Routes have shape (gpus + 1, replicas, replicas): [i, r, q] is the boundary before GPU i between
    a stage with r and a stage with q replicas.  All-reduces have shape (gpus + 1, replicas): [i, r]
    is that of the r GPUs that end before GPU i.
    """

    route_latency: Floats
    route_s_per_byte: Floats
    allreduce_start: Floats
    allreduce_s_per_byte: Floats


def search_grid(workload: Workload) -> SearchGrid:
    """All layers, replicas and stages if at most ``MAX_STEPS`` steps suffice, else fewer."""
    layers, n = len(workload.profile), len(workload.cluster)
    stages = min(layers, n)

    def steps(cuts: int, replicas: int, stages: int) -> float:
        return stages * cuts**2 / 2 * n * replicas**2

    all_counts = tuple(range(1, n + 1))
    if steps(layers, n, stages) / 2 <= MAX_STEPS:
        return SearchGrid(tuple(range(layers)), all_counts, stages)
    powers = tuple(r for r in all_counts if r & (r - 1) == 0)
    replicas = all_counts if n <= 16 else powers
    stages = min(stages, MAX_STAGES)
    cuts = int((2 * MAX_STEPS / (steps(1, len(replicas), stages) * 2)) ** 0.5)
    positions = tuple(candidate_cuts(workload, max(2 * stages, min(layers, cuts))))
    return SearchGrid(positions, replicas, stages)


def best_partitions(
    workload: Workload,
    order: Sequence[int],
    grid: SearchGrid,
    allreduce: AllReduceModel,
    effort: Effort,
) -> list[tuple[float, tuple[Stage, ...]]]:
    """For each number of stages, the least bottleneck in seconds and the stages that reach it.

    ``order`` is the row of GPUs.  Numbers of stages for which nothing fits into memory are left
    out, and all of them if the time limit is reached first.
    """
    cuts = [*grid.cuts, len(workload.profile)]
    links = _link_arrays(workload, order, grid, effort)
    if links is None:
        return []
    value, previous = _solve(
        grid.max_stages,
        np.array(grid.replicas, dtype=np.int64),
        np.array([workload.slice_share(r) for r in grid.replicas]),
        _stage_arrays(workload, order, cuts),
        links,
        1.0 / workload.micro_batches if allreduce == "shared" else 0.0,
        workload.cluster.duplex == "half",
        workload.state_factor,
    )
    partitions = []
    for k in range(1, grid.max_stages + 1):
        complete = value[k, len(cuts) - 1]
        i, r = np.unravel_index(int(np.argmin(complete)), complete.shape)
        if np.isfinite(complete[i, r]):
            stages = _trace_back(previous, (k, len(cuts) - 1, int(i), int(r)), cuts, order, grid)
            partitions.append((float(complete[i, r]), stages))
    return partitions


def _stage_arrays(workload: Workload, order: Sequence[int], cuts: Sequence[int]) -> StageArrays:
    return StageArrays(
        np.array(workload.forward_s)[cuts] + np.array(workload.backward_s)[cuts],
        np.array(workload.parameter_bytes)[cuts],
        np.array(workload.stored_bytes)[cuts],
        np.array(workload.cut_bytes)[cuts],
        np.array(workload.gradient_bytes)[cuts],
        np.array([workload.cluster.memory[g] for g in order]),
    )


def _link_arrays(
    workload: Workload, order: Sequence[int], grid: SearchGrid, effort: Effort
) -> LinkArrays | None:
    """The costs of all links of the row; None if the time limit is reached first."""
    n, count = len(order), len(grid.replicas)
    latency, s_per_byte = np.zeros((n + 1, count, count)), np.zeros((n + 1, count, count))
    allreduce_start, allreduce_s_per_byte = np.zeros((n + 1, count)), np.zeros((n + 1, count))
    routes = 0
    for i in range(1, n + 1):
        for a, r in enumerate(grid.replicas):
            if r > i:
                continue
            gpus = tuple(order[i - r : i])
            if r > 1:
                line = workload.allreduce_line(gpus)
                allreduce_start[i, a], allreduce_s_per_byte[i, a] = line
            if routes >= ROUTES_PER_CHECK:
                routes = 0
                if effort.is_over:
                    return None
            for b, q in enumerate(grid.replicas):
                routes += 1
                if i + q <= n:
                    route = workload.route(gpus, tuple(order[i : i + q]))
                    latency[i, a, b], s_per_byte[i, a, b] = route.latency_s, route.s_per_byte
    return LinkArrays(latency, s_per_byte, allreduce_start, allreduce_s_per_byte)


def _trace_back(
    previous: Longs,
    last: tuple[int, int, int, int],
    cuts: Sequence[int],
    order: Sequence[int],
    grid: SearchGrid,
) -> tuple[Stage, ...]:
    """The stages of a plan from the indices (k, cut, i, r) of its last stage."""
    stages: list[Stage] = []
    k, end, i, r = last
    while k > 0:
        first, r_before = (int(x) for x in previous[k, end, i, r])
        gpus = tuple(order[i - grid.replicas[r] : i])
        stages.append(Stage(cuts[first], cuts[end], gpus))
        i -= grid.replicas[r]
        k, end, r = k - 1, first, r_before
    return tuple(reversed(stages))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _solve(
    max_stages: int,
    replicas: Longs,
    shares: Floats,
    stages: StageArrays,
    links: LinkArrays,
    allreduce_share: float,
    half_duplex: bool,
    state_factor: float,
) -> tuple[Floats, Longs]:
    """W and, for each entry, the cut and replica index of the stage before the last.

    W has shape (stages + 1, cuts + 1, gpus + 1, replicas) and is infinite if nothing fits into
    memory.  ``shares`` are the parts of a micro-batch that a replica runs, by number of replicas.
    ``allreduce_share`` 0 stands for the ``hidden`` model.
    """
    time, parameters, stored, cut, gradient, memory = stages
    latency, s_per_byte, allreduce_start, allreduce_s_per_byte = links
    n, ends, count = memory.shape[0], time.shape[0], replicas.shape[0]
    value = np.full((max_stages + 1, ends, n + 1, count), np.inf)
    previous = np.zeros((max_stages + 1, ends, n + 1, count, 2), np.int64)
    for i in range(1, n + 1):
        for a in range(count):
            r = replicas[a]
            if r > i:
                continue
            room = memory[i - r : i].min()
            for end in range(1, ends):
                for first in range(end - 1, -1, -1):
                    size = parameters[end] - parameters[first]
                    if state_factor * size + (stored[end] - stored[first]) * shares[a] > room:
                        break
                    load = (time[end] - time[first]) * shares[a]
                    allreduce = 0.0
                    if size > 0:
                        allreduce = allreduce_start[i, a] + size * allreduce_s_per_byte[i, a]
                    if allreduce_share > 0:
                        load = load + allreduce_share * allreduce
                    else:
                        load = max(load, allreduce)
                    if first == 0:
                        if load < value[1, end, i, a]:
                            value[1, end, i, a] = load
                        continue
                    for b in range(count):
                        if replicas[b] > i - r:
                            continue
                        wait = latency[i - r, b, a]
                        forward = wait + cut[first] * s_per_byte[i - r, b, a]
                        back = wait + gradient[first] * s_per_byte[i - r, b, a]
                        transfer = forward + back if half_duplex else max(forward, back)
                        floor = max(load, transfer)
                        for k in range(2, max_stages + 1):
                            bottleneck = max(floor, value[k - 1, first, i - r, b])
                            if bottleneck < value[k, end, i, a]:
                                value[k, end, i, a] = bottleneck
                                previous[k, end, i, a, 0] = first
                                previous[k, end, i, a, 1] = b
    return value, previous
