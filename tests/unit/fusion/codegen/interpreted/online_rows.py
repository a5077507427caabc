"""Kernels with online softmax and kernels of peeled rows, in Triton's interpreter.

``python -m tests.unit.fusion.codegen.interpreted.online_rows FOLDER EXAMPLES`` prints errors as
JSON.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from tools.interpreters.triton_interpreter import prepare

from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.online_reductions import online_pairs
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.graphs.wide_rows import wide_rows
from tests.unit.fusion.codegen.interpreted.bounds_checking import BoundsCheckedKernel

INF, LEAST = float("inf"), -3.4028234663852886e38
ROWS, COLUMNS = 9, 411
"""One row for each case of :func:`insert_special_rows`, and columns that no chunk width divides;
the rows are unaligned."""


def reduce_row(build: Builder, op: str, value: int) -> int:
    return build(op, value, dims=(1,), keepdim=True)


def softmax(build: Builder, x: int, *, guard: bool = False) -> tuple[int, int, int]:
    """The maximum of x, x - maximum, and the sum of exp(x - maximum).

    ``guard``: as in logsumexp, 0 replaces an infinite maximum.
    """
    highest = shift = reduce_row(build, "amax", x)
    if guard:
        is_infinite = build("eq", build("abs", highest), build.constant(INF))
        shift = build("where", is_infinite, build.constant(0.0), highest)
    centred = build("sub", x, shift)
    return shift, centred, reduce_row(build, "sum", build("exp", centred))


def cross_entropy(shape: tuple[int, int], dtype: str) -> Graph:
    """Cross-entropy and its gradient for each row, as in PyTorch's decompositions."""
    build = Builder()
    x, target = build.input(shape, dtype), build.input((shape[0], 1), "int64")
    _, centred, total = softmax(build, build("cast", x, dtype="float32"))
    log_p = build("sub", centred, build("log", total))
    hit = build("eq", build("iota", shape=shape[1:], dtype="int64", start=0, step=1), target)
    loss = build("neg", reduce_row(build, "sum", build("where", hit, log_p, build.constant(0.0))))
    gradient = build("sub", build("exp", log_p), build("cast", hit, dtype="float32"))
    return build.graph(loss, build("cast", gradient, dtype=dtype))


def lse_and_softmax(shape: tuple[int, int], dtype: str) -> Graph:
    """Logsumexp and softmax of one tensor, each with its own maximum, and all reductions."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    shift, _, total = softmax(build, x, guard=True)
    highest, centred, other = softmax(build, x)
    share = build("div", build("exp", centred), other)
    loss = build("add", build("log", total), shift)
    return build.graph(loss, highest, total, other, build("cast", share, dtype=dtype))


def random_graph(seed: int, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Graph:
    """Softmaxes of one or two values, some guarded, and other reductions beside and after them."""
    draw = random.Random(seed)
    build = Builder()
    inputs = [build.input(shape, draw.choice(("float16", "float32"))) for _ in range(2)]
    x, y = (build("cast", value, dtype="float32") for value in inputs)
    if draw.randint(0, 1):
        x = build("mul", x, build.input(shape[1:], "float32"))
    outputs = []
    for value in (x, y)[: draw.randint(1, 2)]:
        shift, centred, total = softmax(build, value, guard=bool(draw.randint(0, 1)))
        kind = draw.choice(("loss", "share", "powers", "entropy"))
        if kind == "loss":
            outputs.append(build("add", build("log", total), shift))
        elif kind == "share":
            outputs.append(build("div", build("exp", centred), total))
        elif kind == "powers":
            # An output between both reductions needs a pass of its own.
            outputs += [build("exp", centred), total]
        else:
            log_p = build("sub", centred, build("log", total))
            outputs.append(reduce_row(build, "sum", build("mul", build("exp", log_p), log_p)))
    outputs.append(reduce_row(build, draw.choice(("sum", "amin", "amax")), y))
    if not draw.randint(0, 3):
        outputs.append(build("add", x, reduce_row(build, "amax", x)))
    return build.graph(*outputs)


def insert_special_rows(value: torch.Tensor, *, largest: float = 300.0) -> None:
    """Fill rows 1 to 8 with special cases: lanes, parts or all of a row infinite or NaN, or values
    that grow along the row up to ``largest`` in magnitude."""
    last = value.shape[1] - 1
    value[1, last] = float("nan")
    value[2] = -INF
    value[3, 5] = INF
    value[4, :last] = -INF
    value[5, ::2] = -INF
    value[6] = torch.linspace(-largest, 2 * largest / 3, last + 1)
    value[7] = torch.finfo(value.dtype).min
    value[8, 3], value[8, last] = INF, -INF


# Some splits are behind the last column and have nothing to reduce.
PLANS = [
    KernelPlan("looped", 1, (256,), 1),
    KernelPlan("looped", 4, (256,), 4),
    KernelPlan("split", 1, (256,), 1, 4),
    KernelPlan("split", 4, (256,), 4, 4),
    KernelPlan("looped", 1, (256,), 1, peeled=True),
    KernelPlan("split", 1, (256,), 1, 4, peeled=True),
    KernelPlan("shared", 1, (128,), 1, peeled=True),
    KernelPlan("shared", 1, (128,), 1, async_copies=True, peeled=True),
]


def find_errors(program: Program, seed: int, folder: Path) -> list[str]:
    """Run a program, with special rows if ``seed`` is even, and describe errors."""
    kernel = BoundsCheckedKernel(load_kernel(program, folder))
    stitched = StitchedGraph(program.graph, (kernel,), Counter())  # type: ignore[arg-type]
    inputs = random_inputs(program.graph, seed, special=False)
    for value in inputs:
        if value.dtype.is_floating_point and value.shape[0] == ROWS and not seed % 2:
            insert_special_rows(value)
    try:
        errors = find_value_errors(stitched, inputs, with_guard_bands(stitched)(*inputs))
    except OutOfBoundsWrite as stray:
        errors = [str(stray)]
    return [f"{program.plan}: {t}\n{program.graph}" for t in [*errors, *kernel.violations]]


def online_softmax_errors(folder: Path, examples: int) -> tuple[list[str], int]:
    """Errors of fixed and random graphs, and the number of graphs with an online softmax."""
    graphs = [make((ROWS, COLUMNS), "float16") for make in (cross_entropy, lse_and_softmax)]
    errors: list[str] = []
    paired = 0
    for seed in range(examples):
        graph = graphs[seed] if seed < len(graphs) else random_graph(seed)
        schedule = schedule_operators(graph, graph.operators)
        paired += bool(online_pairs(schedule))
        # Plans with several rows in a program run faster in the interpreter.
        fast_plans = (PLANS[1], PLANS[3], PLANS[4 + seed % 4])
        for at, plan in enumerate(PLANS if seed < len(graphs) else fast_plans):
            if illegal_reason(schedule, plan) is None:
                errors += find_errors(emit(plan_kernel(schedule, plan)), (seed + at) // 2, folder)
    return errors, paired


def peeled_row_errors(folder: Path, examples: int) -> tuple[list[str], int]:
    """Errors of random graphs with unaligned, peeled rows, and the number of kernels."""
    errors: list[str] = []
    kernels = 0
    for seed in range(examples):
        graph = wide_rows(seed, COLUMNS)
        schedule = schedule_operators(graph, graph.operators)
        plan = PLANS[4 + seed % 2]
        if illegal_reason(schedule, plan) is None:
            kernels += 1
            errors += find_errors(emit(plan_kernel(schedule, plan)), 1, folder)
    return errors, kernels


# Damages to the kernel of logsumexp and softmax: a regular expression and its replacement.
DAMAGES = {
    "the sum is not scaled": (r"s \* below \+ 1\.0", "s + 1.0"),
    "the maximum counts once too often": (r"s \* below \+ 1\.0", "(s + 1.0) * below + 1.0"),
    "lanes are not scaled": (r"s \* libdevice\.fast_expf\(m - highest\)", "s"),
    "lanes beyond the end count": (r"tl\.where\(inside, (\w+), float\(\"-inf\"\)\)", r"\1"),
    "it begins at -inf": (r"-3\.402823\d+e\+38", 'float("-inf")'),
    "a row of -inf has the sum 0": (r"tl\.where\((s\d+) == 0\.0, float\(\"nan\"\), s\d+\)", r"\1"),
    "a guarded sum is NaN": (r"tl\.where\(v\d+ == float\(\"inf\"\), .*, (s\d+)\)", r"\1"),
    "the maximum is not -inf": (r"(a\d+) = tl\.where\(a\d+ == 0\.0, .*, a\d+\)", r"\1 = \1"),
}


# Damages to the kernel of cross-entropy with peeled rows.
PEELED_DAMAGES = {
    "the last row is read as far as others": (
        r"(whole = )\w+\.minimum\((.*), behind\)",
        r"\1\2",
    ),
    "its last elements are left out": (r"if whole < ahead \+ \d+:", "if whole < 0:"),
    "a row too many": (r"\(\(count - 1\)", "((count)"),
    "the row before is written": (r"lowest = .*", "lowest = 0"),
    "the row behind is written": (r"(highest = \(ahead \+ )", r"\1 8 + "),
    "edges are not written": (r"if \(first < lowest\) .*:", "if first < 0:"),
    "what is ahead counts": (r"\(c >= 0\) & ", ""),
}


def damaged_kernel_errors(
    folder: Path, graph: Graph, plan: KernelPlan, seed: int, damages: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, list[str]]]:
    """The errors that are found in damaged kernels; there should be some for each damage."""
    correct = emit(plan_kernel(schedule_operators(graph, graph.operators), plan))
    for name, (pattern, damaged) in damages.items():
        source, times = re.subn(pattern, damaged, correct.source)
        assert times, name
        yield name, find_errors(replace(correct, source=source), seed, folder)


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder, examples = Path(sys.argv[1]), int(sys.argv[2])
    online = lse_and_softmax((ROWS, COLUMNS), "float32"), KernelPlan("looped", 1, (256,), 1)
    peeled = (
        cross_entropy((ROWS, COLUMNS), "float32"),
        KernelPlan("looped", 1, (256,), 1, peeled=True),
    )
    on_chip = peeled[0], PLANS[-1]
    result = {
        "rows": online_softmax_errors(folder, examples),
        "odd": peeled_row_errors(folder, examples),
        "broken": dict(damaged_kernel_errors(folder, *online, 0, DAMAGES)),
        "broken peeled": dict(damaged_kernel_errors(folder, *peeled, 1, PEELED_DAMAGES)),
        "broken on chip": dict(damaged_kernel_errors(folder, *on_chip, 1, PEELED_DAMAGES)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
