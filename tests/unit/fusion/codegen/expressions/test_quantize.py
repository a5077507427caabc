"""Which kernels leave rounding to the conversion to an integer, and which round themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.sm90_code import opcodes
from tests.unit.fusion.patterns import as_int8, quantised

FLAT = KernelPlan("thread", 1, (128,), 1)
SHAPE = (4, 96)


def source(graph: Graph, operators: tuple[int, ...] = ()) -> str:
    return emit(plan_kernel(schedule_operators(graph, operators or graph.operators), FLAT)).source


def test_what_becomes_a_clamped_integer_is_rounded_once() -> None:
    build = Builder()
    text = source(build.graph(as_int8(build, build.input(SHAPE, "float16"))))
    assert "rint" not in text
    assert text.count("_rounded(") == 2  # its definition and the cast


def _otherwise(case: str) -> Graph:
    build = Builder()
    rounded = build("round", build.input(SHAPE))
    low, high, dtype = -127.0, 127.0, "int8"
    if case == "between halves":
        low = -127.5
    if case == "beyond int8":
        high = 200.0
    if case == "to float16":
        dtype = "float16"
    clamped = build("maximum", rounded, build.constant(low))
    if case == "from one side":
        return build.graph(build("cast", clamped, dtype=dtype))
    clamped = build("minimum", clamped, build.constant(high))
    if case == "multiplied first":
        clamped = build("mul", clamped, build.constant(0.5))
    result = build("cast", clamped, dtype=dtype)
    if case == "a result":
        return build.graph(result, rounded)
    if case == "clamped, a result":
        return build.graph(result, clamped)
    if case == "read by others":
        return build.graph(result, build("neg", rounded))
    return build.graph(result)


@pytest.mark.parametrize(
    "case",
    [
        "between halves",
        "beyond int8",
        "to float16",
        "from one side",
        "multiplied first",
        "a result",
        "clamped, a result",
        "read by others",
    ],
)
def test_what_is_read_otherwise_is_rounded_as_it_is_said(case: str) -> None:
    text = source(_otherwise(case))
    assert "rint" in text
    assert "_rounded" not in text


def test_a_kernel_that_ends_before_the_cast_rounds() -> None:
    build = Builder()
    graph = build.graph(as_int8(build, build.input(SHAPE)))
    *before, _ = graph.operators
    for end in range(1, len(before) + 1):
        assert "rint" in source(graph, tuple(before[:end]))


def test_quantising_takes_no_instruction_to_round_or_for_the_sign(tmp_path: Path) -> None:
    graph = quantised((512, 4096), "float16")
    plan = KernelPlan("block", 1, (4096,), 4)
    code = opcodes(emit(plan_kernel(schedule_operators(graph, graph.operators), plan)), tmp_path)
    assert not [one for one in code if one.startswith("FRND")]
    assert sum(one.startswith("F2I") for one in code) == 32
    assert sum(one.startswith("LOP3") for one in code) < 32
