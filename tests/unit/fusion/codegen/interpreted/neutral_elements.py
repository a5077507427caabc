"""Reductions of rows in which a wrong neutral element would win, in Triton's interpreter.

``python -m tests.unit.fusion.codegen.interpreted.neutral_elements FOLDER`` prints as JSON the wrong
values of each reduction, and the schemes of the kernels that were run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tools.interpreters.triton_interpreter import prepare
from torch import Tensor

from nostall.fusion import Builder
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.stitched_graph import stitch
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from tests.unit.fusion.codegen.accuracy import with_guard_bands
from tests.unit.fusion.codegen.interpreted.interpreting import representative_plans

FLOATS, INTEGERS = ("float32", "bfloat16"), ("int64", "int32", "int8")
ELEMENTS = {
    "sum": (1, FLOATS + INTEGERS),
    "prod": (1, FLOATS + INTEGERS),
    "amax": (-3, FLOATS + INTEGERS),
    "amin": (3, (*FLOATS, *INTEGERS, "uint8")),
    "any": (0, ("bool",)),
    "all": (1, ("bool",)),
}
"""Reduction -> the value of all elements, and the types.

The result differs if lanes behind the end of a row, or an accumulator's first value, hold anything
but the neutral element: 0, 1, the least and the largest value, false, true.
"""
SHAPES = ((3, 5), (3, 300))
"""Rows and columns; no number is a power of two, so that some lanes hold no element.

Short rows run with the first type alone: the types differ in the neutral element, not in the lanes.
"""


def wrong_values(folder: Path, op: str, dtype: str, seen: set[str]) -> Iterator[str]:
    """Reductions of rows and of columns whose result is not that of PyTorch."""
    value, (first, *_) = ELEMENTS[op]
    for shape in SHAPES if dtype == first else SHAPES[-1:]:
        for axis in (0, 1):
            build = Builder()
            reduced = build(op, build.input(shape, dtype), dims=(axis,), keepdim=False)
            graph = build.graph(reduced)
            elements = torch.full(shape, value, dtype=getattr(torch, dtype))
            expected = _reduce(op, elements, axis)
            schedule = schedule_operators(graph, graph.operators)
            for plan in representative_plans(schedule):
                stitched = stitch(
                    graph,
                    [graph.operators],
                    choice=lambda s, plan=plan: plan_kernel(s, plan),
                    folder=folder,
                )
                (got,) = with_guard_bands(stitched)(elements)
                seen.add(plan.scheme)
                if not torch.equal(got.reshape(expected.shape), expected.to(got.dtype)):
                    yield f"{op} of {dtype} {shape} over axis {axis}, {plan}: {got.flatten()[:3]}"


def _reduce(op: str, elements: Tensor, axis: int) -> Tensor:
    reduced: Tensor = getattr(torch, op)(elements, axis)
    return reduced


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder, seen = Path(sys.argv[1]), set[str]()
    wrong = {
        f"{op} {dtype}": list(wrong_values(folder, op, dtype, seen))
        for op, (_, dtypes) in ELEMENTS.items()
        for dtype in dtypes
    }
    print(json.dumps({"wrong": wrong, "schemes": sorted(seen)}))


if __name__ == "__main__":
    main()
