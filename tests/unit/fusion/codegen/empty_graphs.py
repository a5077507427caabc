"""Run in a process of its own: random graphs with an axis of no elements, results as JSON.

``python -m tests.unit.fusion.codegen.empty_graphs FOLDER EXAMPLES`` prints what is wrong with them and why
operators were left to PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from hypothesis import given
from torch import Tensor

from nostall.fusion.codegen.runtime.stitched_graph import stitch
from nostall.fusion.testing.triton_interpreter import prepare
from tests.unit.fusion.codegen.interpreting import examples_of, wrong
from tests.unit.fusion.codegen.random_graphs import RandomGraph, operator_graphs


def empty_graphs(folder: Path, examples: int) -> tuple[list[str], Counter[str], Counter[str]]:
    """What is wrong, what was seen, and the reasons."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    @examples_of(examples)
    @given(operator_graphs(empty=True))
    def check(made: RandomGraph) -> None:
        stitched = stitch(made.graph, folder=folder)
        seen["graphs"] += 1
        seen["kernels"] += stitched.kernels
        for reason, count in stitched.illegal_reasons.items():
            reasons[reason.partition(" reads or makes ")[2] or reason] += count
        found.extend(f"{text}\n{made.graph}" for text in wrong(made.graph, stitched, made.seed))

    check()
    return found, seen, reasons


def compiled() -> list[str]:
    """What ``torch.compile`` does otherwise with an empty batch, and with none of it empty."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(-1) * 2, x.exp().sum(0)

    options = {"nostall.choose": "stitched", "nostall.fallback": "eager"}
    run = torch.compile(function, backend="nostall", dynamic=False, options=options)
    found = []
    for shape in ((0, 4), (3, 4)):
        x = torch.ones(shape)
        pairs = zip(run(x), function(x), strict=True)
        found += [f"{shape}" for got, wanted in pairs if not torch.allclose(got, wanted)]
    return found


def main() -> None:
    os.environ["NOSTALL_HOME"] = sys.argv[1]
    prepare()
    torch.set_num_threads(1)
    found, seen, reasons = empty_graphs(Path(sys.argv[1]), int(sys.argv[2]))
    print(json.dumps({"wrong": found, "seen": seen, "reasons": reasons, "compiled": compiled()}))


if __name__ == "__main__":
    main()
