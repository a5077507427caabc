"""Kernels with index-set splitting at the column of a label, in Triton's interpreter.

The labels are at the ends of chunks, outside the row and outside int32.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.emit.schemes.shared import emit_shared
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.builder import Builder
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)

WIDTH = 64
ROWS = ((320, "float16"), (300, "float32"), (301, "float16"), (301, "float32"))
"""Columns and dtype of rows: full chunks only, a masked last chunk, and unaligned rows."""
CHUNK_ENDS = [WIDTH * chunk + offset for chunk in (1, 2, 4) for offset in range(-8, 3)]
LABELS = [*range(-2, 3), *CHUNK_ENDS, *range(298, 302), 319, 320, 2**40, -(2**40), -(2**63)]


def two_label_gradient(shape: tuple[int, int], dtype: str) -> Graph:
    """The log-softmax at a first label, and the softmax, less 1 at that label and doubled at a
    second label."""
    build = Builder()
    x = build.input(shape, dtype)
    labels = [build.input((shape[0], 1), "int64") for _ in range(2)]
    count = build("iota", shape=shape[1:], dtype="int64", start=0, step=1)
    first, second = (build("eq", count, label) for label in labels)
    share = build("sub", x, build("amax", x, dims=(1,), keepdim=True))
    total = build("sum", build("exp", share), dims=(1,), keepdim=True)
    loss = build("sub", share, build("log", total))
    mine = build("sum", build("where", first, loss, build.constant(0.0)), dims=(1,), keepdim=True)
    less = build("sub", build("exp", loss), build("cast", first, dtype="float32"))
    twice = build("where", second, build("mul", less, build.constant(2.0)), less)
    return build.graph(mine, build("cast", twice, dtype=dtype))


def programs() -> Iterator[Program]:
    """The kernel of each kind of rows."""
    for columns, dtype in ROWS:
        graph = two_label_gradient((len(LABELS), columns), dtype)
        plan = KernelPlan("shared", 1, (WIDTH,), 1, async_copies=True, peeled=columns % 2 == 1)
        yield emit_shared(plan_kernel(schedule_operators(graph, graph.operators), plan))


def find_errors(program: Program, folder: Path) -> list[str]:
    """Run a program with all labels and describe wrong values and stray writes."""
    graph = program.graph
    stitched = StitchedGraph(graph, (load_kernel(program, folder),), Counter())
    x, *_ = random_inputs(graph, 1)
    labels = torch.tensor(LABELS)[:, None]
    inputs = [x, labels, labels.roll(1, 0)]
    try:
        errors = find_value_errors(stitched, inputs, with_guard_bands(stitched)(*inputs))
    except OutOfBoundsWrite as stray:
        errors = [str(stray)]
    return [f"{program.plan}, {graph[0]}: {text}" for text in errors]


def label_column_errors(folder: Path) -> list[str]:
    """Errors of all kernels."""
    return [text for program in programs() for text in find_errors(program, folder)]


DAMAGES = {
    "a chunk ends early": (r"if (.*) \+ 64\):", r"if \1 + 63):"),
    "a chunk begins late": (r"if (.*?) >= ", r"if \1 > "),
    "a label is forgotten": (r"if \(s.* or (.*):", r"if \1:"),
}


def damaged_kernel_errors(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The errors that are found in damaged kernels; there should be some for each damage."""
    *_, correct = programs()
    for name, (pattern, damaged) in DAMAGES.items():
        (match,) = re.finditer(pattern, correct.source)
        source = correct.source[: match.start()] + match.expand(damaged)
        source += correct.source[match.end() :]
        yield name, find_errors(replace(correct, source=source), folder)
