"""Checks of the torch.compile backend that run in two ranks of a distributed job.

Both ranks must run the same version, whatever their stores contain.
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
    CompiledFunction,
    Result,
    digest,
    relative_difference,
    result_and_gradients,
)

STEPS_AFTER = 3
"""Training steps after the choice."""


def check_ranks(device: str, small: bool, folder: Path) -> Result:
    """One of two ranks with separate stores; both must run the version that rank 0 chooses."""
    rank = int(os.environ["RANK"])
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    width, rows = (24, 6) if small else (5000, 4096)
    torch.manual_seed(0)
    dtype = torch.float32 if small else torch.float16
    module = nn.Sequential(nn.LayerNorm(width), nn.GELU()).to(device, dtype)
    run = CompiledFunction(module, device)
    x = torch.randn(rows, width, device=device, dtype=dtype, requires_grad=True)
    deadline = time.perf_counter() + LIMIT_S
    from nostall.attach.torch_compile.runtime.custom_op import record_calls

    while not run.backend.reports or (not run.has_chosen and time.perf_counter() < deadline):
        result_and_gradients(run, module, x)
        time.sleep(0.02 * rank)  # leave the GPU to rank 0, which measures on it
    with record_calls() as kernel_names:
        result_digest = digest(result_and_gradients(run, module, x))
    distributed.barrier()
    (report,) = run.backend.reports
    return {
        "digest": result_digest,
        "kernels": sorted(kernel_names),
        "told": str(report),
        "wrong": [] if run.has_chosen else ["nothing was chosen"],
    }


class FeedForward(nn.Module):
    """A feed-forward block with pre-norm, GELU, softmax and residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))).softmax(-1)


def check_ddp(device: str, small: bool, folder: Path) -> Result:
    """One of two ranks that train with DistributedDataParallel, compared with eager PyTorch.

    Dynamo splits the graph at DDP's buckets.  Each rank has its own GPU if there are two.
    """
    from torch.nn.parallel import DistributedDataParallel

    from nostall.attach.torch_compile.runtime.custom_op import record_calls

    rank = int(os.environ["RANK"])
    distributed: Any = torch.distributed
    has_own_gpu = device == "cuda" and torch.cuda.device_count() > 1
    rank_device = f"cuda:{rank if has_own_gpu else 0}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(rank_device)
    distributed.init_process_group(
        "nccl" if has_own_gpu else "gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    width, rows, bucket_mb = (24, 6, 0.002) if small else (2500, 8192, 25)
    if small:
        distributed._DEFAULT_FIRST_BUCKET_BYTES = 1500
    programs = []
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.Sequential(*(FeedForward(width) for _ in range(2 if small else 4))).to(
            rank_device
        )
        wrapped = DistributedDataParallel(module, bucket_cap_mb=bucket_mb)
        programs.append((wrapped, torch.optim.SGD(module.parameters(), 1e-2)))
    run = CompiledFunction(programs[0][0], device)
    x = torch.randn(
        rows, width, device=rank_device, generator=torch.Generator(rank_device).manual_seed(rank)
    )
    deadline, steps_after_choice, max_difference = time.perf_counter() + LIMIT_S, 0, 0.0
    while steps_after_choice < STEPS_AFTER:
        with record_calls() as kernel_names:
            results = [_step(run, programs[0][1], x), _step(programs[1][0], programs[1][1], x)]
        max_difference = max(max_difference, relative_difference(*results))
        is_done = time.perf_counter() > deadline or (run.backend.reports and run.has_chosen)
        all_done = torch.tensor(float(bool(is_done)), device=rank_device)
        distributed.all_reduce(all_done, distributed.ReduceOp.MIN)
        steps_after_choice += int(all_done.item())
    parameters = [
        [parameter.detach() for parameter in module.parameters()] for module, _ in programs
    ]
    drift = max(map(relative_difference, *parameters))
    distributed.barrier()
    reports = run.backend.reports
    wrong = [] if run.has_chosen else ["nothing was chosen"]
    if max_difference > 1e-3 or drift > 1e-3:
        wrong.append(f"results off by {max_difference:.1e}, parameters by {drift:.1e}")
    return {
        "digest": digest(parameters[0]),
        "kernels": sorted(kernel_names),
        "told": [str(report) for report in reports],
        "by": "nccl" if has_own_gpu else "gloo",
        "graphs": len(reports),
        "results apart": max_difference,
        "parameters apart": drift,
        "wrong": wrong,
    }


def _step(function: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    y: Tensor = function(x)
    y.square().mean().backward()
    optimizer.step()
    return y.detach()
