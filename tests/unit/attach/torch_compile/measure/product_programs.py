"""Measurements of products in Triton's interpreter, with clocks that return given times.

``python -m tests.unit.attach.torch_compile.measure.product_programs FOLDER`` prints as JSON how
many kernels are chosen and what the report says, by case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor

from nostall.attach.torch_compile.measure.product_comparison import ProductComparisons
from nostall.attach.torch_compile.options import Options
from nostall.attach.torch_compile.rewrite.compilers import EagerCompiler
from nostall.attach.torch_compile.rewrite.kernel_selection import KernelFilter
from nostall.attach.torch_compile.rewrite.products import products_of
from nostall.attach.torch_compile.store.regions import region_key
from nostall.core.measurement import Kind
from nostall.fusion.capture import inference_graph
from nostall.gpu.clock import Clock, Run, Samples
from tests.unit.fusion.products.programs import AsModule, feed_forward, swiglu, tensors


class FixedTimes:
    """The kernel takes ``seconds``, and cuBLAS with Inductor's kernels takes 1; all runs run."""

    name = "fixed"
    kind: Kind = "measured"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.asked = 0

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        self.asked += 1
        for run in runs:
            run()
        return [[self._seconds if at == 1 else 1.0] * 12 for at in range(len(runs))]


class TimesInTurn(FixedTimes):
    """The kernels of the measured products take given times, one after the other."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(seconds[0])
        self._turns = iter(seconds)

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        if len(runs) == 3 and runs[0] is runs[2]:  # with Inductor's version; not configurations
            self._seconds = next(self._turns)
        return super().samples(graph, runs, seconds)


def gated_residual(x: Tensor, gate: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
    return kept + (torch.sigmoid(gate) * x) @ weight


def outcome(clock: Clock | None, program: Any, shapes: Any, **options: Any) -> dict[str, Any]:
    """Chosen kernels and lines of the report."""
    inputs = tensors(*shapes, dtype=torch.float32)
    compared = ProductComparisons(clock, Options(products="measure", **options), {})
    module = inference_graph(AsModule(program), *inputs)
    compared.add(module)
    chosen = compared.chosen(EagerCompiler(), KernelFilter())
    captured_and_products = products_of(module)
    assert captured_and_products is not None
    kernels = [found.kernel for found in captured_and_products[1].found]
    return {
        "prologues": [bool(k.prologue) for k in kernels if region_key(k.graph) in chosen],
        "kernels": len(chosen),
        "lines": compared.lines,
        "asked": getattr(clock, "asked", 0),
    }


FEED_FORWARD = ((32, 16), (16, 32), (32, 16))
SWIGLU = ((32, 16), (16, 32), (16, 32), (32, 16))


def gated_shapes(rows: int) -> tuple[tuple[int, int], ...]:
    return ((rows, 16), (rows, 16), (16, 32), (rows, 32))


def main(folder: str) -> dict[str, Any]:
    prepare()
    os.environ["NOSTALL_HOME"] = folder
    torch.set_float32_matmul_precision("high")
    late = outcome(FixedTimes(0.5), feed_forward, FEED_FORWARD, product_seconds=1e-9)
    slower = outcome(FixedTimes(2.0), swiglu, SWIGLU)
    return {
        "without a clock": outcome(None, feed_forward, FEED_FORWARD),
        "late": late,
        "faster": outcome(FixedTimes(0.5), feed_forward, FEED_FORWARD),
        "stored": outcome(FixedTimes(2.0), feed_forward, FEED_FORWARD),
        "slower": slower,
        "prologue": outcome(TimesInTurn(0.9, 0.5, 0.8), gated_residual, gated_shapes(32)),
        "epilogue": outcome(TimesInTurn(0.5, 0.8, 0.9), gated_residual, gated_shapes(48)),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
