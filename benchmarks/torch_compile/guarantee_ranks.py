"""What one of two processes of a job does for ``benchmarks.torch_compile.guarantees``: the same version on
both, whatever each of them has in its store.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.torch_compile.guarantee_checks import (
    LIMIT_S,
    Found,
    Run,
    digest,
    distance,
    gradients,
)

STEPS_AFTER = 3
"""Steps of training with the version that stays."""


def ranks(device: str, small: bool, place: Path) -> Found:
    """One of two processes of a job, each with a store of its own; the choice is rank 0's."""
    rank = int(os.environ["RANK"])
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", f"file://{place / 'meeting'}", rank=rank, world_size=2)
    width, rows = (24, 6) if small else (5000, 4096)
    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.float16
    module = nn.Sequential(nn.LayerNorm(width), nn.GELU()).to(device, dtype)
    run = Run(module, device)
    x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    end = time.perf_counter() + LIMIT_S
    from nostall.attach.torch_compile.runtime.custom_op import record_calls

    while not run.backend.reports or (not run.chosen and time.perf_counter() < end):
        gradients(run, module, x)
        time.sleep(0.02 * rank)  # the GPU is rank 0's while it compares
    with record_calls() as called:
        found = digest(gradients(run, module, x))
    distributed.barrier()
    (report,) = run.backend.reports
    return {
        "digest": found,
        "kernels": sorted(called),
        "told": str(report),
        "wrong": [] if run.chosen else ["nothing was chosen"],
    }


class Feed(nn.Module):
    """Norm, matrix products and an activation with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))).softmax(-1)


def ddp(device: str, small: bool, place: Path) -> Found:
    """One of two processes that train by DistributedDataParallel, whose buckets PyTorch splits the
    graph into, beside the same in eager PyTorch; each on a GPU of its own where there are two."""
    from torch.nn.parallel import DistributedDataParallel

    from nostall.attach.torch_compile.runtime.custom_op import record_calls

    rank = int(os.environ["RANK"])
    distributed: Any = torch.distributed
    apart = device == "cuda" and torch.cuda.device_count() > 1
    where = f"cuda:{rank if apart else 0}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(where)
    distributed.init_process_group(
        "nccl" if apart else "gloo", f"file://{place / 'meeting'}", rank=rank, world_size=2
    )
    width, rows, bucket_mb = (24, 6, 0.002) if small else (2500, 8192, 25)
    if small:
        distributed._DEFAULT_FIRST_BUCKET_BYTES = 1500
    programs = []
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.Sequential(*(Feed(width) for _ in range(2 if small else 4))).to(where)
        wrapped = DistributedDataParallel(module, bucket_cap_mb=bucket_mb)
        programs.append((wrapped, torch.optim.SGD(module.parameters(), 1e-2)))
    run = Run(programs[0][0], device)
    x = torch.randn(rows, width, device=where, generator=torch.Generator(where).manual_seed(rank))
    end, after, worst = time.perf_counter() + LIMIT_S, 0, 0.0
    while after < STEPS_AFTER:
        with record_calls() as called:
            results = [_step(run, programs[0][1], x), _step(programs[1][0], programs[1][1], x)]
        worst = max(worst, distance(*results))
        over = time.perf_counter() > end or (run.backend.reports and run.chosen)
        ready = torch.tensor(float(bool(over)), device=where)
        distributed.all_reduce(ready, distributed.ReduceOp.MIN)
        after += int(ready.item())
    parameters = [[p.detach() for p in module.parameters()] for module, _ in programs]
    drift = max(map(distance, *parameters))
    distributed.barrier()
    reports = run.backend.reports
    wrong = [] if run.chosen else ["nothing was chosen"]
    if worst > 1e-3 or drift > 1e-3:
        wrong.append(f"results off by {worst:.1e}, parameters by {drift:.1e}")
    return {
        "digest": digest(parameters[0]),
        "kernels": sorted(called),
        "told": [str(report) for report in reports],
        "by": "nccl" if apart else "gloo",
        "graphs": len(reports),
        "results apart": worst,
        "parameters apart": drift,
        "wrong": wrong,
    }


def _step(function: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    y: Tensor = function(x)
    y.square().mean().backward()
    optimizer.step()
    return y.detach()
