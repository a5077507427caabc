"""A loss of logits in Triton's interpreter, by the times and the peak memory of its candidates.

``python -m tests.unit.attach.torch_compile.selection.loss_programs FOLDER`` prints as JSON what
ran, by case.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor
from torch.nn import functional

from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.measure import graph_comparison
from nostall.attach.torch_compile.rewrite import loss as rewrite
from nostall.attach.torch_compile.runtime import chunked_loss
from tests.unit.attach.torch_compile.selection.second_candidate_programs import (
    MAX_CALLS,
    GraphClock,
    KernelClock,
)

CASES: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {
    # Ratios of the candidates; peak memory in MB: Inductor's and the candidate's, in turn.
    "faster": ((1.2,), (100, 50)),
    "less memory": ((1.0,), (100, 50)),
    "too slow": ((0.8, 1.1), (100, 50, 100, 100)),
    "fewer chunks": ((0.98, 1.0), (100, 50, 100, 60)),
    "slow with fewer chunks": ((0.98, 0.99, 1.0), (100, 50, 100, 60, 100, 100)),
    "more memory": ((1.2, 1.0), (100, 104, 100, 103)),
}


def normalized_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """A softmax, which has a kernel, and a loss of logits."""
    logits = functional.linear(hidden.softmax(-1), weight)
    return functional.cross_entropy(logits, labels)


def outcome(name: str, folder: str) -> dict[str, Any]:
    """What ran until the selection and after it, and what the report says; then a second run."""
    ratios, peaks = CASES[name]
    os.environ["NOSTALL_HOME"] = f"{folder}/{name}"
    memory = [each * 1_000_000 for each in peaks]

    def peak_bytes(run: Callable[[], object], args: Sequence[object]) -> int:
        return memory.pop(0)

    graph_comparison.peak_bytes = peak_bytes
    hidden = torch.randn(32, 16, requires_grad=True)
    weight = torch.randn(24, 16, requires_grad=True)
    labels = torch.randint(24, (32,))
    expected = normalized_loss(hidden, weight, labels)
    gradients = torch.autograd.grad(expected, (hidden, weight))
    result: dict[str, Any] = {}
    for run in ("first", "second"):
        torch._dynamo.reset()
        backend = Backend(GraphClock(*ratios), KernelClock())
        options = {"nostall.fallback": "eager", "nostall.tuned_plans": 0}
        compiled = torch.compile(normalized_loss, backend=backend, options=options)
        difference = 0.0
        for _ in range(MAX_CALLS):
            found = compiled(hidden, weight, labels)
            pairs = zip(torch.autograd.grad(found, (hidden, weight)), gradients, strict=True)
            difference = max(difference, *(float((a - b).abs().max()) for a, b in pairs))
            (report,) = backend.reports
            if report.reason:
                break
        chunks = len(_chunks)
        compiled(hidden, weight, labels)
        result[run] = {
            "state": report.state,
            "reason": report.reason,
            "loss": report.loss,
            "chunks": len(_chunks) - chunks,
            "difference": difference,
            "explanation": report.explain().splitlines()[1],
            "earlier": [each.candidate for each in report.earlier],
        }
    return result


_chunks: list[Any] = []
_run_rows = chunked_loss._run_rows


def _counted(*args: Any, **kwargs: Any) -> None:
    _chunks.append(args)
    _run_rows(*args, **kwargs)


def main(folder: str) -> None:
    torch.manual_seed(0)
    prepare()
    chunked_loss._run_rows = _counted
    rewrite.LEAST_BYTES = rewrite.LEAST_ROWS = 0
    print(json.dumps({name: outcome(name, folder) for name in CASES}))


if __name__ == "__main__":
    main(sys.argv[1])
