"""Kernels that take the places of a sequence by turns, in Triton's interpreter:
``python -m tests.unit.fusion.codegen.sequence_layouts FOLDER EXAMPLES`` prints what is wrong, as JSON."""

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
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
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
from tests.unit.fusion.codegen.online_rows import INF, ROWS, strange

PLACES = (9, 16, 17, 100, 128)
"""More than a turn has, whole turns and what is left of one."""


def softmax(build: Builder, scores: int, dtype: str) -> tuple[int, int, int, int]:
    """Shares along the last axis as PyTorch's decomposition has them, powers, maximum and sum."""
    wide = build("cast", scores, dtype="float32")
    highest = build("amax", wide, dims=(2,), keepdim=True)
    powers = build("exp", build("sub", wide, highest))
    total = build("sum", powers, dims=(2,), keepdim=True)
    return build("cast", build("div", powers, total), dtype=dtype), powers, highest, total


def scored(build: Builder, x: int, query: int, biased: bool) -> int:
    """Of each place the product with a query, (batch, 1, places); with a ``biased`` input."""
    batch, places, width = build.nodes[x].shape
    product = build("dot", query, build("permute", x, dims=(0, 2, 1)))
    product = build("mul", product, build.constant(width**-0.5))
    if not biased:
        return product
    bias = build.input((batch, places), build.nodes[x].dtype)
    return build("add", product, build("view", bias, shape=(batch, 1, places)))


def attended(places: int, width: int, dtype: str, *, told: bool = False) -> Graph:
    """A query over a sequence; the maximum and the sum of powers, too, where they are ``told``."""
    build = Builder()
    x, query = build.input((ROWS, places, width), dtype), build.input((ROWS, 1, width), dtype)
    share, _, highest, total = softmax(build, scored(build, x, query, biased=True), dtype)
    made = build("dot", share, x)
    return build.graph(made, *([highest, total] if told else []))


def among_places(count: int) -> Graph:
    """The first places, added up, are the query, and are changed by the result."""
    build = Builder()
    x = build.input((ROWS, 17, 24), "float32")
    some = build("slice", x, shape=(ROWS, count, 24), dim=1, start=0, step=1)
    query = build("sum", some, dims=(1,), keepdim=True) if count > 1 else some
    share, *_ = softmax(build, scored(build, x, query, biased=False), "float32")
    return build.graph(build("sub", some, build("dot", share, x)))


def several_rows() -> Graph:
    """Shares of four softmaxes, added up."""
    build, dtype = Builder(), "float32"
    x, query = build.input((ROWS, 17, 24), dtype, (408, 1, 17)), build.input((ROWS, 1, 24), dtype)
    scores = scored(build, x, query, biased=False)
    scores = build("add", scores, build.input((ROWS, 4, 17), dtype))
    share, *_ = softmax(build, scores, dtype)
    total = build("sum", share, dims=(1, 2), keepdim=True)
    return build.graph(build("mul", total, build.input((ROWS, 4, 1), dtype)))


def drawn(seed: int, floats: tuple[str, ...] = ("float16", "float32", "bfloat16")) -> Graph:
    """One or two queries, or a learned one, with masks, dropout and other sums beside them."""
    draw = random.Random(seed)
    build, dtype = Builder(), draw.choice(floats)
    places, width = draw.choice(PLACES), draw.choice((1, 8, 24, 64))
    shape = (ROWS, places, width)
    lies = draw.choice(("along width", "along places"))
    strides = (places * width, 1, places) if lies == "along places" else None
    x = build.input(shape, dtype, strides)
    values = build.input(shape, dtype) if draw.randint(0, 1) else x
    outputs: list[int] = []
    for _ in range(draw.randint(1, 2)):
        query = build.input((ROWS, 1, width), dtype)
        if draw.randint(0, 2) == 0:
            query = build("expand", build.input((1, 1, width), dtype), shape=(ROWS, 1, width))
        scores = scored(build, x, query, bool(draw.randint(0, 1)))
        if draw.randint(0, 2) == 0:
            mask = build.input((ROWS, 1, places), "bool")
            scores = build("where", mask, scores, build.constant(draw.choice((-1e4, -INF))))
        share, powers, highest, total = softmax(build, scores, dtype)
        kind = draw.choice(("plain", "lse", "dropped", "residual", "powers", "sums", "gated"))
        if kind == "dropped":
            kept = build.input((ROWS, 1, places), "bool")
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


def turned(graph: Graph) -> list[KernelPlan]:
    """A plan for each number of places at once; warps change nothing here."""
    found = {
        plan.chunks: plan
        for plan in plans(schedule_operators(graph, graph.operators)).legal_plans
        if plan.scheme == "turned"
    }
    return list(found.values())


def wrong(program: Program, seed: int, folder: Path) -> list[str]:
    """What is wrong with a kernel; with an even ``seed`` some scores are NaN and infinite."""
    whole = StitchedGraph(program.graph, (load_kernel(program, folder),), Counter())
    inputs = random_inputs(program.graph, seed, special=False)
    for value in inputs:
        if not seed % 2 and value.dtype.is_floating_point and value.ndim == 2:
            strange(value, largest=100.0)
    try:
        found = find_value_errors(whole, inputs, with_guard_bands(whole)(*inputs))
    except OutOfBoundsWrite as stray:
        found = [str(stray)]
    return [f"{program.plan}: {text}\n{program.graph}" for text in found]


def sequences(folder: Path, examples: int) -> tuple[list[str], int]:
    """What is wrong with chains and random graphs, and how many kernels there were."""
    found: list[str] = []
    graphs = [attended(places, 24, "float16") for places in PLACES[:3]]
    graphs += [among_places(1), among_places(8), several_rows()]
    kernels = 0
    for seed in range(examples):
        graph = graphs[seed] if seed < len(graphs) else drawn(seed)
        for at, plan in enumerate(turned(graph)):
            kernels += 1
            schedule = schedule_operators(graph, graph.operators)
            found += wrong(emit(plan_kernel(schedule, plan)), seed + at, folder)
    return found, kernels


# What is damaged in the kernel of a query: a pattern, and what stands for it.
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
    "the last turn begins early": (r"= 16 \+ tl", "= 8 + tl"),
}


def broken(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """What is found when a right kernel is damaged."""
    graph = attended(17, 24, "float32", told=True)
    right = emit(plan_kernel(schedule_operators(graph, graph.operators), turned(graph)[0]))
    for name, (pattern, damaged) in DAMAGES.items():
        source, times = re.subn(pattern, damaged, right.source)
        assert times, name
        yield name, wrong(replace(right, source=source), 0, folder)


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    folder, examples = Path(sys.argv[1]), int(sys.argv[2])
    found = {"sequences": sequences(folder, examples), "broken": dict(broken(folder))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
