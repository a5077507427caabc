"""Peephole rewrite of quantization: kernels whose cast rounds, and kernels with a ``round``."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.sm90_code import opcodes
from tests.unit.fusion.patterns import as_int8, quantised

FLAT = KernelPlan("thread", 1, (128,), 1)
SHAPE = (4, 96)


def source(graph: Graph, operators: tuple[int, ...] = ()) -> str:
    return emit(plan_kernel(schedule_operators(graph, operators or graph.operators), FLAT)).source


def test_a_clamped_integer_is_rounded_by_the_cast() -> None:
    build = Builder()
    text = source(build.graph(as_int8(build, build.input(SHAPE, "float16"))))
    assert "rint" not in text
    assert text.count("_rounded(") == 2  # definition and cast


def _graph_that_needs_round(case: str) -> Graph:
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
def test_other_users_of_a_round_need_it(case: str) -> None:
    text = source(_graph_that_needs_round(case))
    assert "rint" in text
    assert "_rounded" not in text


def test_a_kernel_that_ends_before_the_cast_rounds() -> None:
    build = Builder()
    graph = build.graph(as_int8(build, build.input(SHAPE)))
    *before, _ = graph.operators
    for end in range(1, len(before) + 1):
        assert "rint" in source(graph, tuple(before[:end]))


def test_quantization_has_no_round_or_sign_instruction(tmp_path: Path) -> None:
    graph = quantised((512, 4096), "float16")
    plan = KernelPlan("block", 1, (4096,), 4)
    opcode_list = opcodes(
        emit(plan_kernel(schedule_operators(graph, graph.operators), plan)), tmp_path
    )
    assert not [code for code in opcode_list if code.startswith("FRND")]
    assert sum(code.startswith("F2I") for code in opcode_list) == 32
    assert sum(code.startswith("LOP3") for code in opcode_list) < 32
