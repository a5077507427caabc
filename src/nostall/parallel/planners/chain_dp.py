"""Partition, replication and mapping onto a row of GPUs, by dynamic programming.

W(l, k, r, i): the least bottleneck over plans of the first l layers in k stages on the first i
GPUs of the row, the last stage replicated r times on consecutive ones.  Loads are seconds per
micro-batch: a stage's compute and its share of the all-reduce, a boundary's transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.parallel.plan import Stage, Workload
from nostall.parallel.planners.merging import candidate_cuts

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Reduce = Literal["shared", "hidden"]
"""How the all-reduce counts in a stage's load: a share of 1/M of it on top (synchronous
training), or the larger of compute and all-reduce (PipeDream, once per micro-batch)."""
WORK = 3e8
"""Steps of the inner loop that are taken for exact; more are saved by merging layers and by
trying powers of two as replicas."""
MOST_STAGES = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """What the search looks at; ``exact`` when nothing was left out."""

    cuts: tuple[int, ...]
    replicas: tuple[int, ...]
    stages: int
    exact: bool


def grid(work: Workload, limit: float = WORK, most_stages: int | None = None) -> Grid:
    """All layers, replicas and stages if they fit into the limit, else the coarser choice."""
    layers, n = len(work.profile), len(work.cluster)
    stages = min(layers, n, most_stages or n)

    def cost(cuts: int, replicas: int, stages: int) -> float:
        return stages * cuts**2 / 2 * n * replicas**2

    whole = tuple(range(1, n + 1))
    if cost(layers, n, stages) / 2 <= limit:
        return Grid(tuple(range(layers)), whole, stages, True)
    powers = tuple(r for r in whole if r & (r - 1) == 0)
    replicas = whole if n <= 16 else powers
    stages = min(stages, MOST_STAGES)
    cuts = int((2 * limit / (cost(1, len(replicas), stages) * 2)) ** 0.5)
    chosen = tuple(candidate_cuts(work, max(2 * stages, min(layers, cuts))))
    return Grid(chosen, replicas, stages, False)


def best_chains(
    work: Workload, order: Sequence[int], size: Grid, reduce: Reduce
) -> list[tuple[float, tuple[Stage, ...]]]:
    """For each number of stages the plan with the least bottleneck, and that bottleneck.

    Numbers of stages for which nothing fits into memory are left out.
    """
    at = [*size.cuts, len(work.profile)]
    time = np.array(work.forward)[at] + np.array(work.backward)[at]
    tables = _reduce_tables(work, order, size)
    value, back = _solve(
        size.stages,
        len(order),
        np.array(size.replicas, dtype=np.int64),
        time,
        np.array(work.parameters)[at],
        np.array(work.stored)[at],
        np.array(work.cut)[at],
        np.array(work.cut_back)[at],
        *_routes(work, order, size),
        *tables,
        1.0 / work.micro_batches if reduce == "shared" else 0.0,
        work.cluster.duplex == "half",
        work.state_factor,
        np.array([work.cluster.memory[g] for g in order]),
    )
    found = []
    for k in range(1, size.stages + 1):
        ends = value[k, len(at) - 1]
        i, r = np.unravel_index(int(np.argmin(ends)), ends.shape)
        if np.isfinite(ends[i, r]):
            stages = _trace(back, k, len(at) - 1, int(i), int(r), at, order, size.replicas)
            found.append((float(ends[i, r]), stages))
    return found


def _routes(work: Workload, order: Sequence[int], size: Grid) -> tuple[Floats, Floats]:
    """Latency and seconds per byte of the boundary before GPU i, shape (i, r', r)."""
    n, count = len(order), len(size.replicas)
    latency, per_byte = np.zeros((n + 1, count, count)), np.zeros((n + 1, count, count))
    for i in range(1, n):
        for a, r in enumerate(size.replicas):
            for b, q in enumerate(size.replicas):
                if r <= i and i + q <= n:
                    way = work.route(tuple(order[i - r : i]), tuple(order[i : i + q]))
                    latency[i, a, b], per_byte[i, a, b] = way.latency_s, way.s_per_byte
    return latency, per_byte


def _reduce_tables(work: Workload, order: Sequence[int], size: Grid) -> tuple[Floats, Floats]:
    """All-reduce seconds at 0 and per byte for r GPUs that end before GPU i, shape (i, r)."""
    shape = (len(order) + 1, len(size.replicas))
    start, per_byte = np.zeros(shape), np.zeros(shape)
    for i in range(1, len(order) + 1):
        for a, r in enumerate(size.replicas):
            if 1 < r <= i:
                gpus = tuple(order[i - r : i])
                start[i, a] = work.allreduce_s(gpus, 1e-9)
                per_byte[i, a] = (work.allreduce_s(gpus, 1e9) - start[i, a]) * 1e-9
    return start, per_byte


def _trace(
    back: Longs,
    k: int,
    end: int,
    i: int,
    r: int,
    at: Sequence[int],
    order: Sequence[int],
    replicas: Sequence[int],
) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    while k > 0:
        first, before = (int(x) for x in back[k, end, i, r])
        gpus = tuple(order[i - replicas[r] : i])
        stages.append(Stage(at[first], at[end], gpus))
        i -= replicas[r]
        k, end, r = k - 1, first, before
    return tuple(reversed(stages))


@njit(cache=True)  # type: ignore[untyped-decorator]
def _solve(
    stages: int,
    n: int,
    replicas: Longs,
    time: Floats,
    parameters: Floats,
    stored: Floats,
    cut: Floats,
    cut_back: Floats,
    latency: Floats,
    per_byte: Floats,
    reduce_start: Floats,
    reduce_byte: Floats,
    share: float,
    half: bool,
    state_factor: float,
    memory: Floats,
) -> tuple[Floats, Longs]:
    """Bottlenecks, shape (stages + 1, cuts + 1, gpus + 1, replicas), and (cut, r') before each."""
    ends, count = time.shape[0], replicas.shape[0]
    value = np.full((stages + 1, ends, n + 1, count), np.inf)
    back = np.zeros((stages + 1, ends, n + 1, count, 2), np.int64)
    for i in range(1, n + 1):
        for a in range(count):
            r = replicas[a]
            if r > i:
                continue
            room = memory[i - r : i].min()
            for end in range(1, ends):
                for first in range(end - 1, -1, -1):
                    size = parameters[end] - parameters[first]
                    if state_factor * size + (stored[end] - stored[first]) / r > room:
                        break
                    load = (time[end] - time[first]) / r
                    reduce = reduce_start[i, a] + size * reduce_byte[i, a] if size > 0 else 0.0
                    load = load + share * reduce if share > 0 else max(load, reduce)
                    if first == 0:
                        if load < value[1, end, i, a]:
                            value[1, end, i, a] = load
                        continue
                    for b in range(count):
                        if replicas[b] > i - r:
                            continue
                        wait = latency[i - r, b, a]
                        one = wait + cut[first] * per_byte[i - r, b, a]
                        two = wait + cut_back[first] * per_byte[i - r, b, a]
                        floor = max(load, one + two if half else max(one, two))
                        for k in range(2, stages + 1):
                            w = max(floor, value[k - 1, first, i - r, b])
                            if w < value[k, end, i, a]:
                                value[k, end, i, a] = w
                                back[k, end, i, a, 0] = first
                                back[k, end, i, a, 1] = b
    return value, back
