"""A product and a softmax in Triton's interpreter, whose first candidate is not faster.

``python -m tests.unit.attach.torch_compile.selection.second_candidate_programs FOLDER`` prints as
JSON what ran, by case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor
from torch.nn import functional

from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.runtime.custom_op import record_calls
from nostall.core.measurement import Kind
from nostall.gpu.clock import Run, Samples

MAX_CALLS = 6000


class GraphClock:
    """A clock by which the candidates have these ratios, one after the other; all runs run."""

    name = "recorded"
    kind: Kind = "measured"

    def __init__(self, *ratios: float) -> None:
        self._ratios = [*ratios]

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        for run in runs:
            run()
        return [[1.0] * 12, [1.0 / self._ratios.pop(0)] * 12, [1.0] * 12]


class KernelClock:
    """A clock by which the second of several runs is always the fastest; all runs run."""

    name = "recorded"
    kind: Kind = "measured"
    asked = 0

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        self.asked += 1
        for run in runs:
            run()
        return [[1.0 if at == 1 else 2.0] * 12 for at in range(len(runs))]


def attention_scores(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A product with elementwise readers, and one with a softmax."""
    return (second @ functional.gelu(x @ first).t()).softmax(-1)


def outcome(*ratios: float) -> dict[str, Any]:
    """What ran until the selection and after it, and what the report says."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in ((32, 16), (16, 32), (16, 32))]
    kernel_clock = KernelClock()
    backend = Backend(GraphClock(*ratios), kernel_clock)
    options = {"nostall.fallback": "eager", "nostall.tuned_plans": 0}
    compiled = torch.compile(attention_scores, backend=backend, options=options)
    expected, calls_after, differences = attention_scores(*inputs), 0, []
    for _ in range(MAX_CALLS):
        with record_calls() as kernels, torch.no_grad():
            differences.append(float((compiled(*inputs) - expected).abs().max()))
        (report,) = backend.reports
        calls_after += bool(report.reason)
        if calls_after == 2:
            break
        time.sleep(0.01)  # for the background tasks
    return {
        "state": report.state,
        "reason": report.reason,
        "from store": report.from_store,
        "kernels": sorted(kernels),
        "difference": max(differences),
        "explained": report.explain(),
        "asked": kernel_clock.asked,
        "kept": builders(),
    }


def builders() -> int:
    """How many objects that prepare candidates this process keeps."""
    gc.collect()
    return sum(type(each).__name__ == "CandidateBuilder" for each in gc.get_objects())


def main(folder: str) -> dict[str, Any]:
    prepare()
    torch.set_float32_matmul_precision("high")
    result = {}
    for name, ratios in {"whole": (1.25,), "products": (0.8, 1.25), "none": (0.8, 0.9)}.items():
        os.environ["NOSTALL_HOME"] = f"{folder}/{name}"
        result[name] = outcome(*ratios)
        result[f"{name}, again"] = outcome()
    return result


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
