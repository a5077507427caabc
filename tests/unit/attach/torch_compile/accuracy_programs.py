"""A program with a damaged kernel, compiled by the backend in Triton's interpreter.

``python -m tests.unit.attach.torch_compile.accuracy_programs FOLDER`` prints as JSON which kernels
the backend leaves to Inductor.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor

from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.runtime.custom_op import StitchedOp
from nostall.gpu.clock import RecordedClock

FASTER = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})
OPTIONS = {"nostall.fallback": "eager", "nostall.background": False, "nostall.tuned_plans": 0}
ROWS = 7
"""Rows of the result of the kernel that is damaged; no other kernel has so many."""


def program(x: Tensor, w: Tensor) -> Tensor:
    """Two softmaxes with a matrix product between them, so two kernels."""
    return (x.softmax(-1) @ w).square().softmax(-1)


@contextmanager
def damaged(factor: float) -> Iterator[None]:
    """Multiply the results of the kernel with rows of 5 columns; other kernels stay right."""
    original = StitchedOp.__call__

    def call(self: StitchedOp, inputs: Any) -> list[Tensor]:
        results = original(self, inputs)
        return [x * factor if x.shape[-1] == 5 else x for x in results]

    StitchedOp.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        StitchedOp.__call__ = original  # type: ignore[method-assign]


def outcome(factor: float, folder: Path) -> dict[str, Any]:
    torch._dynamo.reset()
    os.environ["NOSTALL_HOME"] = str(folder)
    backend = Backend(clock=FASTER)
    x, w = torch.randn(ROWS, 12), torch.randn(12, 5)
    with damaged(factor), torch.no_grad():
        compiled = torch.compile(program, backend=backend, options=OPTIONS)
        for _ in range(4):
            result = compiled(x, w)
    (report,) = backend.reports
    return {
        "state": report.state,
        "kernels": report.kernels,
        "inaccurate": report.inaccurate,
        "reason": report.reason,
        "difference": float((result - program(x, w)).abs().max()),
        "explained": report.explain(),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    prepare()
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
    outcomes = {str(factor): outcome(factor, folder / str(factor)) for factor in (1.0, 1.001)}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
