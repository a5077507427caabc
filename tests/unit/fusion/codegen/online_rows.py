"""Kernels that reduce a maximum and the sum of exp(x - maximum) in one walk, in Triton's
interpreter: ``python -m tests.unit.fusion.codegen.online_rows FOLDER EXAMPLES`` prints what is wrong."""

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

from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.loops.online_softmax import online_pairs
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from nostall.fusion.testing.triton_interpreter import prepare
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.bounds_checking import BoundsCheckedKernel
from tests.unit.fusion.codegen.wide_rows import wide_rows

INF, LEAST = float("inf"), -3.4028234663852886e38
ROWS, COLUMNS = 9, 411
"""Rows for each kind of :func:`strange`; columns that no width divides, in rows at odd places."""


def reduced(build: Builder, op: str, value: int) -> int:
    return build(op, value, dims=(1,), keepdim=True)


def softmax(build: Builder, x: int, *, guard: bool = False) -> tuple[int, int, int]:
    """The maximum of x, x - maximum, and the sum of its powers; where ``guard`` as logsumexp
    subtracts it: 0 where it is infinite."""
    highest = shift = reduced(build, "amax", x)
    if guard:
        told = build("eq", build("abs", highest), build.constant(INF))
        shift = build("where", told, build.constant(0.0), highest)
    centred = build("sub", x, shift)
    return shift, centred, reduced(build, "sum", build("exp", centred))


def cross_entropy(shape: tuple[int, int], dtype: str) -> Graph:
    """The loss of each row and its gradient, as PyTorch's decompositions spell them."""
    build = Builder()
    x, target = build.input(shape, dtype), build.input((shape[0], 1), "int64")
    _, centred, total = softmax(build, build("cast", x, dtype="float32"))
    log_p = build("sub", centred, build("log", total))
    hit = build("eq", build("iota", shape=shape[1:], dtype="int64", start=0, step=1), target)
    loss = build("neg", reduced(build, "sum", build("where", hit, log_p, build.constant(0.0))))
    gradient = build("sub", build("exp", log_p), build("cast", hit, dtype="float32"))
    return build.graph(loss, build("cast", gradient, dtype=dtype))


def lse_and_softmax(shape: tuple[int, int], dtype: str) -> Graph:
    """Of one x twice, each with a maximum of its own; all reductions are outputs too."""
    build = Builder()
    x = build("cast", build.input(shape, dtype), dtype="float32")
    shift, _, total = softmax(build, x, guard=True)
    highest, centred, other = softmax(build, x)
    share = build("div", build("exp", centred), other)
    loss = build("add", build("log", total), shift)
    return build.graph(loss, highest, total, other, build("cast", share, dtype=dtype))


def drawn(seed: int, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Graph:
    """Softmaxes of one or two values, some with_guard_bands, with other reductions beside and after."""
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
            # What is written between both reductions leaves no walk to save.
            outputs += [build("exp", centred), total]
        else:
            log_p = build("sub", centred, build("log", total))
            outputs.append(reduced(build, "sum", build("mul", build("exp", log_p), log_p)))
    outputs.append(reduced(build, draw.choice(("sum", "amin", "amax")), y))
    if not draw.randint(0, 3):
        outputs.append(build("add", x, reduced(build, "amax", x)))
    return build.graph(*outputs)


def strange(value: torch.Tensor, *, largest: float = 300.0) -> None:
    """A kind of trouble for each row: where a lane, a part or all of it is infinite or NaN, or it
    grows.  ``largest``: of the row that does."""
    last = value.shape[1] - 1
    value[1, last] = float("nan")
    value[2] = -INF
    value[3, 5] = INF
    value[4, :last] = -INF
    value[5, ::2] = -INF
    value[6] = torch.linspace(-largest, 2 * largest / 3, last + 1)
    value[7] = torch.finfo(value.dtype).min
    value[8, 3], value[8, last] = INF, -INF


# Parts behind the last column have nothing to do.
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


def wrong(program: Program, seed: int, folder: Path) -> list[str]:
    kernel = BoundsCheckedKernel(load_kernel(program, folder))
    whole = StitchedGraph(program.graph, (kernel,), Counter())  # type: ignore[arg-type]
    inputs = random_inputs(program.graph, seed, special=False)
    for value in inputs:
        if value.dtype.is_floating_point and value.shape[0] == ROWS and not seed % 2:
            strange(value)
    try:
        found = find_value_errors(whole, inputs, with_guard_bands(whole)(*inputs))
    except OutOfBoundsWrite as stray:
        found = [str(stray)]
    return [f"{program.plan}: {t}\n{program.graph}" for t in [*found, *kernel.violations]]


def random_rows(folder: Path, examples: int) -> tuple[list[str], int]:
    """What is wrong with chains and random graphs, and how many had a pair with one walk."""
    graphs = [make((ROWS, COLUMNS), "float16") for make in (cross_entropy, lse_and_softmax)]
    found: list[str] = []
    paired = 0
    for seed in range(examples):
        graph = graphs[seed] if seed < len(graphs) else drawn(seed)
        schedule = schedule_operators(graph, graph.operators)
        paired += bool(online_pairs(schedule))
        # Many rows in a program take less time here.
        few = (PLANS[1], PLANS[3], PLANS[4 + seed % 4])
        for at, plan in enumerate(PLANS if seed < len(graphs) else few):
            if illegal_reason(schedule, plan) is None:
                found += wrong(emit(plan_kernel(schedule, plan)), (seed + at) // 2, folder)
    return found, paired


def odd_rows(folder: Path, examples: int) -> tuple[list[str], int]:
    """What is wrong with random graphs whose rows begin at odd places and are read by lanes, and
    how many kernels there were."""
    found: list[str] = []
    kernels = 0
    for seed in range(examples):
        graph = wide_rows(seed, COLUMNS)
        schedule = schedule_operators(graph, graph.operators)
        plan = PLANS[4 + seed % 2]
        if illegal_reason(schedule, plan) is None:
            kernels += 1
            found += wrong(emit(plan_kernel(schedule, plan)), 1, folder)
    return found, kernels


# What is damaged in the kernel of log-sum-exp and softmax: a pattern, and what stands for it.
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


# And in that of cross-entropy, whose rows are peeled.
PEELED_DAMAGES = {
    "the last row is read as far as others": (r"(whole = )\w+\.minimum\((.*), behind\)", r"\1\2"),
    "its last elements are left out": (r"if whole < ahead \+ \d+:", "if whole < 0:"),
    "a row too many": (r"\(\(count - 1\)", "((count)"),
    "the row before is written": (r"lowest = .*", "lowest = 0"),
    "the row behind is written": (r"(highest = \(ahead \+ )", r"\1 8 + "),
    "edges are not written": (r"if \(first < lowest\) .*:", "if first < 0:"),
    "what is ahead counts": (r"\(c >= 0\) & ", ""),
}


def broken(
    folder: Path, graph: Graph, plan: KernelPlan, seed: int, damages: dict[str, tuple[str, str]]
) -> Iterator[tuple[str, list[str]]]:
    """What is found when a right kernel is damaged."""
    right = emit(plan_kernel(schedule_operators(graph, graph.operators), plan))
    for name, (pattern, damaged) in damages.items():
        source, times = re.subn(pattern, damaged, right.source)
        assert times, name
        yield name, wrong(replace(right, source=source), seed, folder)


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder, examples = Path(sys.argv[1]), int(sys.argv[2])
    online = lse_and_softmax((ROWS, COLUMNS), "float32"), KernelPlan("looped", 1, (256,), 1)
    peeled = (
        cross_entropy((ROWS, COLUMNS), "float32"),
        KernelPlan("looped", 1, (256,), 1, peeled=True),
    )
    kept = peeled[0], PLANS[-1]
    found = {
        "rows": random_rows(folder, examples),
        "odd": odd_rows(folder, examples),
        "broken": dict(broken(folder, *online, 0, DAMAGES)),
        "broken peeled": dict(broken(folder, *peeled, 1, PEELED_DAMAGES)),
        "broken on chip": dict(broken(folder, *kept, 1, PEELED_DAMAGES)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
