"""Gradient exchange on several GPUs: AllReduce times by size, and data-parallel steps.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 NCCL_NVLS_ENABLE=0 \\
        python -m benchmarks.workload.gpu_ranks --out part.json --trace bert

This is one rank; ``benchmarks.workload.gpu`` starts all ranks.  The steps use PyTorch's
DistributedDataParallel with its default bucket size.  Each rank writes its own traces, so that
``benchmarks.workload.fit`` can separate transfer from waiting for the other rank.
"""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workload.gpu_models import build_model, train_step
from benchmarks.workload.gpu_profile import features_record, profile_steps

MODELS = ("bert", "gpt", "resnet")
ALLREDUCE_REPEATS, TIMED_STEPS, WARMUP_STEPS = 7, 5, 4
ALLREDUCE_WARMUPS = 2
SLEEP_CYCLES = 200_000
"""GPU cycles before a timed AllReduce, during which the host launches it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trace", help="prefix of the trace files")
    options = parser.parse_args()
    device, tiny = options.device, options.tiny
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    body: dict[str, Any] = {"world": world_size, "models": [], "allreduce": []}
    for exponent in range(12, 15 if tiny else 31):
        body["allreduce"].append(time_all_reduce(2**exponent, device))
    _write_part(body, options.out, rank)
    for name in MODELS[: 1 if tiny else None]:
        prefix = options.trace if name == MODELS[0] else f"{options.trace}_{name}"
        path = options.out.with_name(f"{prefix}_rank{rank}.json.gz") if options.trace else None
        body["models"].append(data_parallel_steps(name, device, tiny, path))
        _write_part(body, options.out, rank)
    dist.barrier()
    dist.destroy_process_group()


def time_all_reduce(size: int, device: str) -> dict[str, float]:
    """Median seconds of an AllReduce of ``size`` bytes (bfloat16) that all ranks start at once."""
    tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    seconds = []
    for _ in range(ALLREDUCE_REPEATS + ALLREDUCE_WARMUPS):
        _synchronize(device)
        dist.barrier()
        _synchronize(device)
        start = perf_counter()
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SLEEP_CYCLES)
            begin.record()
            dist.all_reduce(tensor)
            end.record()
            _synchronize(device)
            seconds.append(begin.elapsed_time(end) * 1e-3)
        else:
            dist.all_reduce(tensor)
            seconds.append(perf_counter() - start)
    return {"bytes": size, "seconds": median(seconds[ALLREDUCE_WARMUPS:])}


def data_parallel_steps(
    name: str, device: str, tiny: bool, trace_path: Path | None
) -> dict[str, Any]:
    """Time and profile the data-parallel steps of one model."""
    model = build_model(name, device, tiny)
    features = features_record(model, device)
    parallel = DistributedDataParallel(model.module)
    for _ in range(WARMUP_STEPS):
        train_step(model, device, parallel)
    seconds = []
    for _ in range(TIMED_STEPS):
        _synchronize(device)
        dist.barrier()
        _synchronize(device)
        start = perf_counter()
        train_step(model, device, parallel)
        _synchronize(device)
        seconds.append(perf_counter() - start)
    info = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    measured = profile_steps(lambda: train_step(model, device, parallel), device, trace_path, info)
    return {"model": name, "described": features, "seconds": seconds, "measured": measured}


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _write_part(body: dict[str, Any], out: Path, rank: int) -> None:
    """Rank 0 writes the results so far after each part, so a time limit loses only later parts."""
    if rank == 0:
        out.write_text(json.dumps(body))


if __name__ == "__main__":
    main()
