"""Tests of one-hot sums: loops select the value at a label's column instead of adding."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.sm90_code import opcodes
from tests.unit.fusion.patterns import cross_entropy

LOOPED = KernelPlan("looped", 1, (256,), 1)
SHAPE = (4, 600)


def source(graph: Graph, plan: KernelPlan = LOOPED) -> str:
    return emit(plan_kernel(schedule_operators(graph, graph.operators), plan)).source


def test_loops_without_masks_select_the_value_of_the_label() -> None:
    text = source(cross_entropy(SHAPE, "float16"))
    assert text.count("a6 = tl.where(v7, v10, a6)") == 1
    # The masked loop adds.
    assert text.count("a6 = a6 + tl.where(inside, v11, 0)") == 1


def test_kernels_in_shared_memory_select_the_value_of_the_label() -> None:
    text = source(cross_entropy((4, 4096), "float16"), KernelPlan("shared", 1, (1024,), 4))
    # In the branch with the label, and in the other branch, from which the compiler removes it.
    assert text.count("a7 = gl.where(v8, v10, a7)") == 2


def gather(shape: tuple[int, int]) -> Graph:
    """Each row less its element at a label that has to be in the row."""
    build = Builder()
    x, label = build.input(shape), build.input((shape[0], 1), "int64")
    count = build("iota", shape=shape[1:], dtype="int64", start=0, step=1)
    checked = build("checked_index", label, size=shape[1])
    chosen = build("where", build("eq", count, checked), x, build.constant(-math.inf))
    return build.graph(build("sub", x, build("amax", chosen, dims=(1,), keepdim=True)))


def test_loops_without_masks_select_the_gathered_value() -> None:
    text = source(gather(SHAPE))
    assert len(re.findall(r"(a\d+) = tl.where\(v\d+, x\d+, \1\)", text)) == 1


@pytest.mark.parametrize("plan", [LOOPED, KernelPlan("shared", 1, (1024,), 4)])
def test_compiled_kernels_assert_that_labels_are_in_their_row(
    plan: KernelPlan, tmp_path: Path
) -> None:
    shape = SHAPE if plan is LOOPED else (4, 4096)
    program = emit(plan_kernel(schedule_operators(gather(shape), gather(shape).operators), plan))
    assert "CALL.ABS.NOINC" in opcodes(program, tmp_path)  # of __assertfail


def _other_sum(case: str) -> Graph:
    build = Builder()
    x, label = build.input(SHAPE), build.input((4, 1), "int64")
    count = build("iota", shape=(600,), dtype="int64", start=0, step=1)
    other = build.constant(0.0)
    condition = build("eq", count, label)
    if case == "not zero elsewhere":
        other = build.constant(1.0)
    if case == "several columns":
        condition = build("le", count, label)
    if case == "a number for each column":
        condition = build("eq", count, build.input(SHAPE, "int64"))
    if case == "a number that is a float":
        condition = build("eq", count, build.input((4, 1), "float32"))
    if case == "a counter that begins again":
        count = build("iota", shape=(600,), dtype="int8", start=0, step=1)
        condition = build("eq", count, label)
    if case == "a counter for pairs of columns":
        pairs = build("iota", shape=(300,), dtype="int64", start=0, step=1)
        pairs = build("expand", build("view", pairs, shape=(300, 1)), shape=(300, 2))
        condition = build("eq", build("view", pairs, shape=(600,)), label)
    chosen = build("where", condition, x, other)
    return build.graph(build("sum", chosen, dims=(1,), keepdim=False))


@pytest.mark.parametrize(
    "case",
    [
        "not zero elsewhere",
        "several columns",
        "a number for each column",
        "a number that is a float",
        "a counter that begins again",
        "a counter for pairs of columns",
    ],
)
def test_other_sums_are_added(case: str) -> None:
    text = source(_other_sum(case))
    added = re.findall(r"(a\d+) = \1 \+ ", text)
    assert len(added) == 2
    assert f", {added[0]})" not in text
