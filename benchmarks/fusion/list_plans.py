"""Benchmark of plans of kernels over lists: elements of a block, warps, programs of norms.

    python -m benchmarks run fusion.list_plans --out OUT [--seconds 0.1] [--small --device cpu]

The graphs are AdamW and the norms of the parameters of a GPT-2 of four layers in fp32.  Each plan's
kernels are captured in a CUDA graph.  The samples are interleaved, and the default plan runs twice
(the null).  OUT has the samples of each plan.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.fusion.optimizer_cases import gpt2_shapes
from benchmarks.harness.result_file import save
from benchmarks.torch_compile.step_timing import capture_step, time_interleaved
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.list_kernels import insert_list_kernels
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.lists.kernel import DEFAULT_PLAN, ListPlan

POINTWISE = [
    replace(DEFAULT_PLAN, block=block, num_warps=warps)
    for block, warps in ((1024, 4), (1024, 8), (2048, 4), (2048, 8), (4096, 8))
]
NORMS = [
    replace(DEFAULT_PLAN, norm_block=block, norm_warps=warps, norm_programs=programs)
    for block, warps, programs in (
        *((2048, 4, 2112), (4096, 8, 2112), (8192, 8, 2112)),
        *((4096, 8, 1056), (4096, 8, 4224), (2048, 4, 4224)),
    )
]


def adamw(lists: Sequence[list[Tensor]]) -> None:
    """AdamW on lists of parameters, gradients, both moments and steps, as Inductor sees it."""
    parameters, gradients, first, second, steps = lists
    count = torch._foreach_add(steps, 1)
    change = torch._foreach_mul(torch._foreach_sub(gradients, first), 0.1)
    mean = torch._foreach_add(first, change)
    squares = torch._foreach_mul(torch._foreach_mul(gradients, gradients), 0.001)
    variance = torch._foreach_add(torch._foreach_mul(second, 0.999), squares)
    bias = torch._foreach_sub(torch._foreach_pow(0.9, count), 1)
    scale = torch._foreach_reciprocal(torch._foreach_div(bias, 1e-3))
    root = torch._foreach_sqrt(
        torch._foreach_neg(torch._foreach_sub(torch._foreach_pow(0.999, count), 1))
    )
    spread = torch._foreach_div(torch._foreach_sqrt(variance), root)
    spread = torch._foreach_div(torch._foreach_add(spread, 1e-8), scale)
    decayed = torch._foreach_mul(parameters, 1 - 1e-5)
    updated = torch._foreach_add(decayed, torch._foreach_div(mean, spread))
    for targets, values in (
        *((parameters, updated), (first, mean), (second, variance), (steps, count)),
    ):
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


def norms(lists: Sequence[list[Tensor]]) -> Tensor:
    """The norms of all gradients as one vector."""
    return torch.cat([norm.unsqueeze(0) for norm in torch._foreach_norm(lists[1], 2)])


def make_lists(small: bool, device: str) -> list[list[Tensor]]:
    """Parameters, gradients, both moments and steps."""
    torch.manual_seed(0)
    shapes = gpt2_shapes(small)
    lists = [[0.02 * torch.randn(s, device=device) for s in shapes] for _ in range(2)]
    lists += [[torch.zeros(s, device=device) for s in shapes] for _ in range(2)]
    return [*lists, [torch.ones((), device=device) for _ in shapes]]


def planned(
    function: Callable[[Any], object], lists: list[list[Tensor]], plan: ListPlan
) -> GraphModule:
    """The graph of a function with kernels over lists by a plan."""
    module: GraphModule = make_fx(function, tracing_mode="fake")(lists)
    insert_list_kernels(module, KernelStore(), KernelFilter(), RewriteResult(), plan)
    return module


def measure(
    function: Callable[[Any], object], plans: Sequence[ListPlan], options: argparse.Namespace
) -> dict[str, Any]:
    """Interleaved samples of all plans, in seconds.

    Kernels change only the lists, so all plans share them.
    """
    lists = make_lists(options.small, options.device)
    runs: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        for plan in plans:
            module = planned(function, lists, plan)

            def run(module: GraphModule = module) -> object:
                return module(lists)

            run()
            print(f"  {plan!r} is compiled", flush=True)
            runs[repr(plan)] = capture_step(run).replay if options.device == "cuda" else run
        return time_interleaved(runs, options, repr(DEFAULT_PLAN))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", dest="measured_s", type=float, default=1.0, help="seconds of all samples"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small parameters, for tests")


def main(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --small --device cpu")
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    measured: dict[str, Any] = {}
    for name, function, plans in (("AdamW", adamw, POINTWISE), ("norms", norms, NORMS)):
        measured[name] = measure(function, plans, options)
        save(options.out, kind="measured", gpu=gpu, torch=torch.__version__, plans=measured)
        for plan, row in measured[name]["samples_s"].items():
            print(f"{name}: {1e6 * sorted(row)[len(row) // 2]:.1f} us {plan}", flush=True)
