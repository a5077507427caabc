"""Random graphs with an axis of size 0 in Triton's interpreter.

``python -m tests.unit.fusion.codegen.interpreted.empty_graphs FOLDER EXAMPLES`` prints as JSON the
errors that were found and the reasons why operators were left to PyTorch.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path

import torch
from hypothesis import given
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor

from nostall.fusion.codegen.runtime.stitched_graph import stitch
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph, operator_graphs
from tests.unit.fusion.codegen.interpreted.interpreting import examples_of, find_errors


def empty_graphs(folder: Path, examples: int) -> tuple[list[str], Counter[str], Counter[str]]:
    """Errors, numbers of graphs and kernels, and the reasons for operators without a kernel."""
    errors: list[str] = []
    seen: Counter[str] = Counter()
    reasons: Counter[str] = Counter()

    @examples_of(examples)
    @given(operator_graphs(empty=True))
    def check(example: RandomGraph) -> None:
        graph = example.graph
        stitched = stitch(graph, folder=folder)
        seen["graphs"] += 1
        seen["kernels"] += stitched.kernels
        for reason, count in stitched.illegal_reasons.items():
            reasons[reason.partition(" reads or makes ")[2] or reason] += count
        errors.extend(f"{text}\n{graph}" for text in find_errors(graph, stitched, example.seed))

    check()
    return errors, seen, reasons


def torch_compile_errors() -> list[str]:
    """Shapes, an empty and a full batch, for which ``torch.compile`` with nostall is wrong."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.softmax(-1) * 2, x.exp().sum(0)

    options = {"nostall.choose": "stitched", "nostall.fallback": "eager"}
    run = torch.compile(function, backend="nostall", dynamic=False, options=options)
    errors = []
    for shape in ((0, 4), (3, 4)):
        x = torch.ones(shape)
        pairs = zip(run(x), function(x), strict=True)
        errors += [f"{shape}" for got, wanted in pairs if not torch.allclose(got, wanted)]
    return errors


def main() -> None:
    os.environ["NOSTALL_HOME"] = sys.argv[1]
    prepare()
    torch.set_num_threads(1)
    errors, seen, reasons = empty_graphs(Path(sys.argv[1]), int(sys.argv[2]))
    result = {"wrong": errors, "seen": seen, "reasons": reasons}
    print(json.dumps(result | {"compiled": torch_compile_errors()}))


if __name__ == "__main__":
    main()
