"""Kernels that loop over the positions of a sequence (scheme ``turned``), in Triton's interpreter.

``python -m tests.unit.fusion.codegen.interpreted.sequence_layouts FOLDER EXAMPLES`` prints errors
as JSON.
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
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.interpreted.online_rows import INF, ROWS, insert_special_rows

LENGTHS = (9, 16, 17, 100, 128)
"""Sequence lengths: longer than a tile, some a multiple of a tile and some not."""


def softmax(build: Builder, scores: int, dtype: str) -> tuple[int, int, int, int]:
    """The softmax along the last axis as in PyTorch's decomposition, then its exponentials, maximum
    and sum."""
    wide = build("cast", scores, dtype="float32")
    highest = build("amax", wide, dims=(2,), keepdim=True)
    powers = build("exp", build("sub", wide, highest))
    total = build("sum", powers, dims=(2,), keepdim=True)
    return build("cast", build("div", powers, total), dtype=dtype), powers, highest, total


def attention_scores(build: Builder, x: int, query: int, biased: bool) -> int:
    """Scaled dots of a query with all positions, of shape (batch, 1, length); ``biased`` adds an
    input."""
    batch, length, width = build.nodes[x].shape
    product = build("dot", query, build("permute", x, dims=(0, 2, 1)))
    product = build("mul", product, build.constant(width**-0.5))
    if not biased:
        return product
    bias = build.input((batch, length), build.nodes[x].dtype)
    return build("add", product, build("view", bias, shape=(batch, 1, length)))


def query_attention(
    length: int, width: int, dtype: str, *, outputs_statistics: bool = False
) -> Graph:
    """Attention of one query; ``outputs_statistics`` adds the softmax's maximum and sum."""
    build = Builder()
    x, query = build.input((ROWS, length, width), dtype), build.input((ROWS, 1, width), dtype)
    share, _, highest, total = softmax(build, attention_scores(build, x, query, biased=True), dtype)
    made = build("dot", share, x)
    return build.graph(made, *([highest, total] if outputs_statistics else []))


def query_from_sequence(count: int) -> Graph:
    """Attention whose query is the sum of the first ``count`` positions; the result is subtracted
    from these positions."""
    build = Builder()
    x = build.input((ROWS, 17, 24), "float32")
    first = build("slice", x, shape=(ROWS, count, 24), dim=1, start=0, step=1)
    query = build("sum", first, dims=(1,), keepdim=True) if count > 1 else first
    share, *_ = softmax(build, attention_scores(build, x, query, biased=False), "float32")
    return build.graph(build("sub", first, build("dot", share, x)))


def sum_of_softmaxes() -> Graph:
    """The sum of four softmaxes."""
    build, dtype = Builder(), "float32"
    x, query = build.input((ROWS, 17, 24), dtype, (408, 1, 17)), build.input((ROWS, 1, 24), dtype)
    scores = attention_scores(build, x, query, biased=False)
    scores = build("add", scores, build.input((ROWS, 4, 17), dtype))
    share, *_ = softmax(build, scores, dtype)
    total = build("sum", share, dims=(1, 2), keepdim=True)
    return build.graph(build("mul", total, build.input((ROWS, 4, 1), dtype)))


def random_graph(seed: int, floats: tuple[str, ...] = ("float16", "float32", "bfloat16")) -> Graph:
    """Attention of one or two queries, with masks, dropout and other reductions beside it."""
    draw = random.Random(seed)
    build, dtype = Builder(), draw.choice(floats)
    length, width = draw.choice(LENGTHS), draw.choice((1, 8, 24, 64))
    shape = (ROWS, length, width)
    contiguous_axis = draw.choice(("width", "length"))
    strides = (length * width, 1, length) if contiguous_axis == "length" else None
    x = build.input(shape, dtype, strides)
    values = build.input(shape, dtype) if draw.randint(0, 1) else x
    outputs: list[int] = []
    for _ in range(draw.randint(1, 2)):
        query = build.input((ROWS, 1, width), dtype)
        if draw.randint(0, 2) == 0:
            query = build("expand", build.input((1, 1, width), dtype), shape=(ROWS, 1, width))
        scores = attention_scores(build, x, query, bool(draw.randint(0, 1)))
        if draw.randint(0, 2) == 0:
            mask = build.input((ROWS, 1, length), "bool")
            scores = build("where", mask, scores, build.constant(draw.choice((-1e4, -INF))))
        share, powers, highest, total = softmax(build, scores, dtype)
        kind = draw.choice(("plain", "lse", "dropped", "residual", "powers", "sums", "gated"))
        if kind == "dropped":
            kept = build.input((ROWS, 1, length), "bool")
            share = build("mul", build("mul", kept, share), build.constant(1 / 0.75))
        if kind == "powers":
            share = build("cast", powers, dtype=dtype)
            outputs.append(total)
        if kind == "gated":
            share = build("sigmoid", scores)
        made = build("dot", share, values)
        if kind == "lse":
            outputs += [build("add", build("log", total), highest), highest]
        if kind == "residual":
            made = build("add", made, build.input((ROWS, 1, width), dtype))
        if kind == "sums":
            outputs += [build(op, x, dims=(1,), keepdim=True) for op in ("sum", "amin")]
            outputs += [build("sum", x, dims=(1, 2), keepdim=False), scores]
            high = build("gt", scores, build.constant(1.0))
            outputs += [build(op, high, dims=(2,), keepdim=True) for op in ("any", "all")]
        outputs.append(made)
    return build.graph(*dict.fromkeys(outputs))


def sequence_plans(graph: Graph) -> list[KernelPlan]:
    """A plan for each tile size; the number of warps does not matter in the interpreter."""
    plans_by_tile = {
        plan.chunks: plan
        for plan in plans(schedule_operators(graph, graph.operators)).legal_plans
        if plan.scheme == "turned"
    }
    return list(plans_by_tile.values())


def find_errors(program: Program, seed: int, folder: Path) -> list[str]:
    """Run a program and describe errors; with an even ``seed`` some scores are NaN or infinite."""
    stitched = StitchedGraph(program.graph, (load_kernel(program, folder),), Counter())
    inputs = random_inputs(program.graph, seed, special=False)
    for value in inputs:
        if not seed % 2 and value.dtype.is_floating_point and value.ndim == 2:
            insert_special_rows(value, largest=100.0)
    try:
        errors = find_value_errors(stitched, inputs, with_guard_bands(stitched)(*inputs))
    except OutOfBoundsWrite as stray:
        errors = [str(stray)]
    return [f"{program.plan}: {text}\n{program.graph}" for text in errors]


def sequence_errors(folder: Path, examples: int) -> tuple[list[str], int]:
    """Errors of fixed and random graphs, and the number of kernels."""
    errors: list[str] = []
    graphs = [query_attention(length, 24, "float16") for length in LENGTHS[:3]]
    graphs += [query_from_sequence(1), query_from_sequence(8), sum_of_softmaxes()]
    kernels = 0
    for seed in range(examples):
        graph = graphs[seed] if seed < len(graphs) else random_graph(seed)
        for at, plan in enumerate(sequence_plans(graph)):
            kernels += 1
            schedule = schedule_operators(graph, graph.operators)
            errors += find_errors(emit(plan_kernel(schedule, plan)), seed + at, folder)
    return errors, kernels


# Damages to the kernel of one query: a regular expression and its replacement.
DAMAGES = {
    "a sum is not scaled": (r"(a\d+) = \1 \* s\d+ \+ \(", r"\1 = \1 + ("),
    "the sum of powers is not scaled": (r"(a\d+) = \1 \* s\d+ \+ v", r"\1 = \1 + v"),
    "lanes are not scaled": (r"tl\.sum\((a\d+) \* s\d+", r"tl.sum(\1"),
    "lanes beyond the end are the highest": (
        r"tl\.where\((in_\w+), (\w+), float\(\"-inf\"\)\)",
        r"tl.where(\1, \2, 1e4)",
    ),
    "lanes beyond the end count": (r"tl\.where\(in_\w+, (v\d+), 0\)", r"\1"),
    "it begins at -inf": (r"-3\.402823\d+e\+38", 'float("-inf")'),
    "a row of -inf has the sum 0": (r"tl\.where\((v\d+) == 0\.0, float\(\"nan\"\), v\d+\)", r"\1"),
    "the maximum is not -inf": (
        r"tl\.where\(v\d+ == 0\.0, float\(\"-inf\"\), (v\d+)\)",
        r"\1",
    ),
    "it is not divided": (r" \* \(1\.0 / v\d+\)", ""),
    "the last tile begins early": (r"= 16 \+ tl", "= 8 + tl"),
}


def damaged_kernel_errors(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The errors that are found in damaged kernels; there should be some for each damage."""
    graph = query_attention(17, 24, "float32", outputs_statistics=True)
    correct = emit(
        plan_kernel(schedule_operators(graph, graph.operators), sequence_plans(graph)[0])
    )
    for name, (pattern, damaged) in DAMAGES.items():
        source, times = re.subn(pattern, damaged, correct.source)
        assert times, name
        yield name, find_errors(replace(correct, source=source), 0, folder)


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder, examples = Path(sys.argv[1]), int(sys.argv[2])
    result = {
        "sequences": sequence_errors(folder, examples),
        "broken": dict(damaged_kernel_errors(folder)),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
