"""Latency and bandwidth between the ranks of a run, measured, as a cluster file."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from nostall.parallel.execute.groups import Groups

SMALL, LARGE = 1 << 16, 1 << 26
"""Bytes of the two messages that latency and bandwidth are worked out from."""
REPEATS = 7


def measured_cluster(name: str, device: torch.device, memory_gib: float) -> str:
    """TOML of one server with a link for each pair of ranks; every rank calls this.

    Point to point: half the time there and back.  Collectives: an all-reduce over all ranks, as
    if its ring were limited by one link (2 (r - 1) / r of its bytes pass each).
    """
    world = dist.get_world_size()
    groups = Groups(device)
    reduce = _allreduce_bytes_per_s(device) if world > 1 else 0.0
    lines = [
        "# Measured by nostall.parallel.execute.measure_links.",
        f'name = "{name}"',
        "[[servers]]",
        f"gpus = {world}",
        f"memory_gib = {memory_gib}",
    ]
    for a in range(world):
        for b in range(a + 1, world):
            latency, speed = _pair(a, b, groups)
            lines += [
                "[[links]]",
                f"gpus = [{a}, {b}]",
                f"bandwidth_gbytes = {speed * 1e-9:.6g}",
                f"allreduce_gbytes = {reduce * 1e-9:.6g}",
                f"latency_us = {latency * 1e6:.6g}",
            ]
    groups.close()
    return "\n".join(lines) + "\n"


def _pair(a: int, b: int, groups: Groups) -> tuple[float, float]:
    """Seconds and bytes per second of a message; the same on all ranks."""
    device, group = groups.device, groups.of((a, b), "links")
    found = torch.zeros(2, dtype=torch.float64, device=device)
    rank = dist.get_rank()
    if rank in (a, b):
        for i, size in enumerate((SMALL, LARGE)):
            buffer = torch.zeros(size, dtype=torch.uint8, device=device)

            def there_and_back(buffer: torch.Tensor = buffer) -> None:
                if rank == a:
                    dist.send(buffer, b, group=group)
                    dist.recv(buffer, b, group=group)
                else:
                    dist.recv(buffer, a, group=group)
                    dist.send(buffer, a, group=group)

            found[i] = _seconds(there_and_back, device) / 2
    dist.broadcast(found, a)
    small, large = found.tolist()
    speed = (LARGE - SMALL) / max(large - small, 1e-9)
    return max(0.0, small - SMALL / speed), speed


def _allreduce_bytes_per_s(device: torch.device) -> float:
    world = dist.get_world_size()
    times = []
    for size in (SMALL, LARGE):
        buffer = torch.zeros(size, dtype=torch.uint8, device=device)

        def reduce(buffer: torch.Tensor = buffer) -> None:
            dist.all_reduce(buffer)

        times.append(_seconds(reduce, device))
    found = torch.tensor(times, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    small, large = map(float, found.tolist())
    return float(2 * (world - 1) / world * (LARGE - SMALL) / max(large - small, 1e-9))


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """Median of several calls, each waited for."""
    times = []
    for _ in range(REPEATS + 2):
        start = perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(perf_counter() - start)
    return statistics.median(times[2:])
