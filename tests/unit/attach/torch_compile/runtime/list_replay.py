"""An update and clipping of lists that is captured once and replayed with other values.

``python -m tests.unit.attach.torch_compile.runtime.list_replay DEVICE`` prints the differences from
eager PyTorch as JSON.  On a GPU a CUDA graph is captured and replayed; on the CPU, where kernels
run in Triton's interpreter, the same function runs again on the same memory.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter, RewriteResult
from nostall.attach.torch_compile.rewrite.list_kernels import insert_list_kernels
from nostall.attach.torch_compile.runtime.custom_op import record_calls
from nostall.attach.torch_compile.store.kernel_store import KernelStore

SHAPES = [(3,), (2049,), (17, 129), (64, 64)]
REPLAYS = 3


def step(parameters: list[Tensor], gradients: list[Tensor], means: list[Tensor]) -> Tensor:
    """Clipping by the norm of all gradients, and a step with momentum; returns the norm."""
    norms = torch.stack(torch._foreach_norm(gradients))
    total = torch.linalg.vector_norm(norms)
    clipped = torch._foreach_mul(gradients, torch.clamp_max(torch.reciprocal(total + 1e-6), 1.0))
    moved = torch._foreach_add(torch._foreach_mul(means, 0.9), clipped)
    changed = torch._foreach_add(parameters, moved, alpha=-0.1)
    for target, value in zip((*parameters, *means), (*changed, *moved), strict=True):
        target.copy_(value)
    return total


def lists(device: str) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(x, generator=generator).to(device) for x in SHAPES] for _ in range(3)]


def captured(run: Callable[[], Tensor], device: str) -> Callable[[], Tensor]:
    """A function that runs ``run`` again on the same memory, without its Python code on a GPU."""
    if device == "cpu":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def outcome(device: str) -> dict[str, Any]:
    """Kernels that the first run calls, and the largest difference from eager PyTorch."""
    module, result = make_fx(step, tracing_mode="fake")(*lists(device)), RewriteResult()
    insert_list_kernels(module, KernelStore(), KernelFilter(), result)
    changed, expected = lists(device), lists(device)
    with record_calls() as kernels:
        module(*lists(device))  # compiles, and checks the direct calls
        module(*lists(device))
    replay = captured(lambda: module(*changed), device)
    differences = []
    for number in range(REPLAYS):
        for gradients in (changed[1], expected[1]):
            torch._foreach_mul_(gradients, 1.0 + number)
        pairs = [(replay(), step(*expected))]
        for found, wanted in zip(changed, expected, strict=True):
            pairs += zip(found, wanted, strict=True)
        differences.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return {
        "kernels": len(set(result.kernels)),
        "called": len(kernels),
        "differences": differences,
    }


def main(device: str) -> dict[str, Any]:
    if device == "cpu":
        prepare()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NOSTALL_HOME"] = folder
        return outcome(device)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
