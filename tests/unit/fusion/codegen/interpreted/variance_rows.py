"""Kernels with online variance in Triton's interpreter.

``python -m tests.unit.fusion.codegen.interpreted.variance_rows FOLDER EXAMPLES`` prints errors as
JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from tools.interpreters.triton_interpreter import prepare

from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.interpreted.online_rows import (
    COLUMNS,
    PLANS,
    ROWS,
    damaged_kernel_errors,
    find_errors,
    reduce_row,
    softmax,
)

LOOPED, SPLIT = KernelPlan("looped", 1, (256,), 1), KernelPlan("split", 1, (256,), 1, 4)


def standardized(build: Builder, x: int, columns: int, *, divide: bool = False) -> int:
    """x less its mean, divided by its standard deviation; ``divide``: a quotient is the mean."""
    total = reduce_row(build, "sum", x)
    number = build.constant(float(columns) if divide else 1 / columns)
    centred = build("sub", x, build("div" if divide else "mul", total, number))
    squares = reduce_row(build, "sum", build("square", centred))
    variance = build("mul", squares, build.constant(1 / columns))
    scale = build("rsqrt", build("add", variance, build.constant(1e-5)))
    return build("mul", centred, scale)


def layer_norm(shape: tuple[int, int] = (ROWS, COLUMNS), dtype: str = "float16") -> Graph:
    """A layer norm with a weight."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    scaled = build("mul", standardized(build, x, shape[1]), build.input(shape[1:], "float32"))
    return build.graph(build("cast", scaled, dtype=dtype))


def two_norms(shape: tuple[int, int] = (ROWS, COLUMNS)) -> Graph:
    """Two layer norms, one after the other, and a statistic of the first."""
    build = Builder()
    x = build.input(shape, "float32")
    once = standardized(build, x, shape[1], divide=True)
    return build.graph(standardized(build, once, shape[1]), reduce_row(build, "amax", once))


def norm_of_softmax(shape: tuple[int, int] = (ROWS, COLUMNS)) -> Graph:
    """A softmax whose result is standardized: both kinds of shared loops."""
    build = Builder()
    x = build.input(shape, "float32")
    _, centred, total = softmax(build, x)
    share = build("div", build("exp", centred), total)
    return build.graph(standardized(build, share, shape[1]))


def sums_of_squares(shape: tuple[int, int] = (ROWS, COLUMNS)) -> Graph:
    """The sum of (x - mean)^2 itself."""
    build = Builder()
    x = build.input(shape, "float32")
    centred = build(
        "sub", x, build("mul", reduce_row(build, "sum", x), build.constant(1 / shape[1]))
    )
    return build.graph(reduce_row(build, "sum", build("square", centred)))


def kernel_errors(folder: Path) -> list[str]:
    """Errors of all graphs and plans, with and without rows of infinities and NaN."""
    errors = []
    for make in (layer_norm, two_norms, norm_of_softmax, sums_of_squares):
        graph = make()
        schedule = schedule_operators(graph, graph.operators)
        for seed, plan in enumerate(PLANS[:6]):
            if illegal_reason(schedule, plan) is None:
                errors += find_errors(emit(plan_kernel(schedule, plan)), seed, folder)
    return errors


def far_from_zero(folder: Path) -> list[float]:
    """Relative errors of the sum of squares for rows with a mean of 10,000 times their deviation.

    One for each of the schemes ``looped`` and ``split``, then that of sums of x and x^2.
    """
    from nostall.fusion.codegen.runtime.kernel import load_kernel

    graph = sums_of_squares()
    x = 1e4 + torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    exact = (x.double() - x.double().mean(1, keepdim=True)).square().sum(1, keepdim=True)
    results = [(x * x).sum(1, keepdim=True) - x.sum(1, keepdim=True) ** 2 / COLUMNS]
    schedule = schedule_operators(graph, graph.operators)
    for plan in (SPLIT, LOOPED):
        results.insert(0, load_kernel(emit(plan_kernel(schedule, plan)), folder)(x)[0])
    return [float(((result - exact) / exact).abs().max()) for result in results]


# Damages to kernels of a layer norm: a regular expression and its replacement.
LOOPED_DAMAGES = {
    "lanes beyond the end count": (r"tl\.where\(inside, _spread\((.*)\), a\d+\)", r"_spread(\1)"),
    "elements are not counted": (r"n \+= 1\.0", "n += 0.0"),
    "lanes keep their own means": (r"return q \+ n \* d \* d", "return q"),
    "the mean is of lanes": (r"own = s / tl\.maximum\(n, 1\.0\)", "own = s"),
}
SPLIT_DAMAGES = {
    "programs have equal elements": (r"(begins \+ 256), 411\)", r"\1, 1024)"),
    "programs keep their own means": (r"return q \+ n \* d \* d", "return q"),
}


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder, graph = Path(sys.argv[1]), layer_norm(dtype="float32")
    looped = damaged_kernel_errors(folder, graph, LOOPED, 1, LOOPED_DAMAGES)
    split = damaged_kernel_errors(folder, graph, SPLIT, 1, SPLIT_DAMAGES)
    result = {
        "wrong": kernel_errors(folder),
        "far from zero": far_from_zero(folder),
        "damaged": {**dict(looped), **dict(split)},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
