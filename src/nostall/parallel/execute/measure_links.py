"""Measurement of latency and bandwidth between the ranks of a run, as a cluster file."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from nostall.parallel.execute.communication.process_groups import ProcessGroups

SMALL_BYTES, LARGE_BYTES = 1 << 16, 1 << 26
"""Sizes of the two messages from whose times latency and bandwidth are computed."""
REPEATS = 7
_WARM_UPS = 2


def measured_cluster(name: str, device: torch.device, memory_gib: float) -> str:
    """TOML text of a cluster of one server, with a measured link for each pair of ranks.

    A collective call: every rank makes it.  The time of a point-to-point message is half of a round
    trip.  The all-reduce bandwidth is that of a ring all-reduce over all ranks, in which
    2 (r - 1) / r of the bytes pass each link.
    """
    world = dist.get_world_size()
    groups = ProcessGroups(device)
    allreduce = _allreduce_bytes_per_s(device) if world > 1 else 0.0
    lines = [
        "# Measured by nostall.parallel.execute.measure_links.",
        f'name = "{name}"',
        "[[servers]]",
        f"gpus = {world}",
        f"memory_gib = {memory_gib}",
    ]
    for a in range(world):
        for b in range(a + 1, world):
            latency_s, bytes_per_s = _measure_pair(a, b, groups)
            lines += [
                "[[links]]",
                f"gpus = [{a}, {b}]",
                f"bandwidth_gbytes = {bytes_per_s * 1e-9:.6g}",
                f"allreduce_gbytes = {allreduce * 1e-9:.6g}",
                f"latency_us = {latency_s * 1e6:.6g}",
            ]
    groups.close()
    return "\n".join(lines) + "\n"


def _measure_pair(a: int, b: int, groups: ProcessGroups) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes/s between two ranks; the same on all ranks."""
    device, group = groups.device, groups.get((a, b), "links")
    times = torch.zeros(2, dtype=torch.float64, device=device)
    rank = dist.get_rank()
    if rank in (a, b):
        for i, size in enumerate((SMALL_BYTES, LARGE_BYTES)):
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)

            def round_trip(buffer: torch.Tensor = buffer) -> None:
                if rank == a:
                    dist.send(buffer, b, group=group)
                    dist.recv(buffer, b, group=group)
                else:
                    dist.recv(buffer, a, group=group)
                    dist.send(buffer, a, group=group)

            times[i] = _median_s(round_trip, device) / 2
    dist.broadcast(times, a)
    small_s, large_s = times.tolist()
    bytes_per_s = (LARGE_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-9)
    return max(0.0, small_s - SMALL_BYTES / bytes_per_s), bytes_per_s


def _allreduce_bytes_per_s(device: torch.device) -> float:
    """Bandwidth of a ring link in an all-reduce over all ranks; the same on all ranks."""
    world = dist.get_world_size()
    medians = []
    for size in (SMALL_BYTES, LARGE_BYTES):
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)

        def allreduce(buffer: torch.Tensor = buffer) -> None:
            dist.all_reduce(buffer)

        medians.append(_median_s(allreduce, device))
    times = torch.tensor(medians, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    small_s, large_s = map(float, times.tolist())
    link_bytes = 2 * (world - 1) / world * (LARGE_BYTES - SMALL_BYTES)
    return float(link_bytes / max(large_s - small_s, 1e-9))


def _median_s(action: Callable[[], None], device: torch.device) -> float:
    """Median time of several calls after warm-up calls; waits for the GPU after each call."""
    times = []
    for _ in range(REPEATS + _WARM_UPS):
        start = perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return statistics.median(times[_WARM_UPS:])
