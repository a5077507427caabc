"""What gradients cost on several GPUs: AllReduce by size, and data-parallel steps.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29512 NCCL_NVLS_ENABLE=0 \\
        python -m benchmarks.workload.gpu_ranks --out part.json --trace bert

is one rank; workload_gpu starts all of them.  The steps are PyTorch's DistributedDataParallel with
its default buckets; every rank keeps its own traces, so that workload_fit can tell transfer from
waiting for the other rank.
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

from benchmarks.workload.gpu_models import make, train_step
from benchmarks.workload.gpu_profile import described, profiled

MODELS = ("bert", "gpt", "resnet")
REPEATS, TIMED, WARM = 7, 5, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trace", help="begin of the traces' names")
    given = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if given.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if given.device == "cuda" else "gloo", timeout=timedelta(seconds=60)
    )
    body: dict[str, Any] = {"world": world, "models": [], "allreduce": []}
    for exponent in range(12, 15 if given.tiny else 31):
        body["allreduce"].append(all_reduce(2**exponent, given.device))
    _keep(body, given.out, rank)
    for name in MODELS[: 1 if given.tiny else None]:
        begin = given.trace if name == MODELS[0] else f"{given.trace}_{name}"
        path = given.out.with_name(f"{begin}_rank{rank}.json.gz") if given.trace else None
        body["models"].append(data_parallel(name, given.device, given.tiny, path))
        _keep(body, given.out, rank)
    dist.barrier()
    dist.destroy_process_group()


def all_reduce(size: int, device: str) -> dict[str, float]:
    """Median seconds of an AllReduce of ``size`` bytes of bfloat16, host in step."""
    tensor = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
    found = []
    for _ in range(REPEATS + 2):
        _wait(device)
        dist.barrier()
        _wait(device)
        began = perf_counter()
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the launch does not count
            begin.record()
            dist.all_reduce(tensor)
            end.record()
            _wait(device)
            found.append(begin.elapsed_time(end) * 1e-3)
        else:
            dist.all_reduce(tensor)
            found.append(perf_counter() - began)
    return {"bytes": size, "seconds": median(found[2:])}


def data_parallel(name: str, device: str, tiny: bool, trace: Path | None) -> dict[str, Any]:
    """One model's steps with gradients exchanged, timed and profiled."""
    model = make(name, device, tiny)
    about = described(model, device)
    parallel = DistributedDataParallel(model.module)
    for _ in range(WARM):
        train_step(model, device, parallel)
    seconds = []
    for _ in range(TIMED):
        _wait(device)
        dist.barrier()
        _wait(device)
        began = perf_counter()
        train_step(model, device, parallel)
        _wait(device)
        seconds.append(perf_counter() - began)
    info = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    found = profiled(lambda: train_step(model, device, parallel), device, trace, info)
    return {"model": name, "described": about, "seconds": seconds, "measured": found}


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _keep(body: dict[str, Any], out: Path, rank: int) -> None:
    """The first rank writes after every part, so that a time limit loses only what comes later."""
    if rank == 0:
        out.write_text(json.dumps(body))


if __name__ == "__main__":
    main()
