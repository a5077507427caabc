"""Rows in shared memory whose turns know whether a label's column is theirs, in Triton's
interpreter: labels at the ends of turns, beside the row, and beyond 32 bits."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.emit.shared import emit_shared
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators
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
"""Whole turns only, a last one with masks, and rows at odd places."""
ENDS = [WIDTH * turn + more for turn in (1, 2, 4) for more in range(-8, 3)]
LABELS = [*range(-2, 3), *ENDS, *range(298, 302), 319, 320, 2**40, -(2**40), -(2**63)]


def labelled(shape: tuple[int, int], dtype: str) -> Graph:
    """A softmax, less 1 at one label of the row and twice as much at another; and its logarithm at
    the first one."""
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
    for columns, dtype in ROWS:
        graph = labelled((len(LABELS), columns), dtype)
        plan = KernelPlan("shared", 1, (WIDTH,), 1, async_copies=True, peeled=columns % 2 == 1)
        yield emit_shared(plan_kernel(schedule_operators(graph, graph.operators), plan))


def wrong(program: Program, folder: Path) -> list[str]:
    graph = program.graph
    whole = StitchedGraph(graph, (load_kernel(program, folder),), Counter())
    x, *_ = random_inputs(graph, 1)
    labels = torch.tensor(LABELS)[:, None]
    inputs = [x, labels, labels.roll(1, 0)]
    try:
        found = find_value_errors(whole, inputs, with_guard_bands(whole)(*inputs))
    except OutOfBoundsWrite as stray:
        found = [str(stray)]
    return [f"{program.plan}, {graph[0]}: {text}" for text in found]


def marked_rows(folder: Path) -> list[str]:
    return [text for program in programs() for text in wrong(program, folder)]


DAMAGES = {
    "a turn ends early": (r"if (.*) \+ 64\):", r"if \1 + 63):"),
    "a turn begins late": (r"if (.*?) >= ", r"if \1 > "),
    "a label is forgotten": (r"if \(s.* or (.*):", r"if \1:"),
}


def broken(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """What is found when a right kernel is damaged."""
    *_, right = programs()
    for name, (pattern, damaged) in DAMAGES.items():
        (match,) = re.finditer(pattern, right.source)
        source = right.source[: match.start()] + match.expand(damaged)
        source += right.source[match.end() :]
        yield name, wrong(replace(right, source=source), folder)
