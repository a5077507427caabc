"""Tests of index-set splitting at a label's column: source text and compiled code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.on_chip import compile_program, emit_program
from tests.unit.fusion.codegen.sm90_code import cubin_opcodes
from tests.unit.fusion.patterns import cross_entropy

pytest.importorskip("triton")
pytest.importorskip("torch")

PLAN = KernelPlan("shared", 1, (1024,), 4, async_copies=True)
ELEMENTS_PER_THREAD = 8
"""Elements of a thread in one chunk."""


def source(graph: Graph) -> str:
    return emit_program(graph, PLAN).source


def test_chunks_without_the_label_do_not_compare() -> None:
    text = source(cross_entropy((64, 4096), "float16"))
    assert text.count("    if (s8 >= at * 1024) & (s8 < at * 1024 + 1024):\n") == 1
    with_label, without_label = text.split("        else:\n")
    assert (
        with_label.count("s8 = gl.sum(gl.sum(_within(x0), 1), 0)\n    for at in range(0, 4):\n")
        == 1
    )
    assert with_label.count("v8 = lanes == (_within(x0) - at * 1024)") == 1
    assert without_label.count("v8 = gl.full((1, 1024), 0, gl.int1, row)") == 1


def test_masked_chunks_compare() -> None:
    text = source(cross_entropy((64, 4100), "float16"))
    masked = text[text.index("for at in range(4, 5):", text.index("s8 = ")) :]
    assert "else" not in masked and "v8 = lanes == " in masked


@pytest.mark.parametrize("is_oldest", [False, True])
def test_one_hot_operators_cost_nothing_in_other_chunks(is_oldest: bool, tmp_path: Path) -> None:
    program = emit_program(cross_entropy((64, 4096), "float16"), PLAN)
    if is_oldest:
        ((cubin, _),) = oldest_triton.compile_program(program, tmp_path)
    else:
        cubin = compile_program(program, tmp_path).cubin
    codes = Counter(code.split(".")[0] for code in cubin_opcodes(cubin))
    # Only in the chunk of the label: the one-hot vector, and the selected logarithm.
    assert codes["FSEL"] <= 2 * ELEMENTS_PER_THREAD + 2
    # exp in the pass of the sum, and in both copies of the pass of the gradient.
    assert codes["MUFU"] >= 3 * ELEMENTS_PER_THREAD


def _unsplit_graph(case: str) -> Graph:
    build = Builder()
    shape = (64, 4096)
    x, label = build.input(shape, "float16"), build.input((64, 1), "int64")
    start = 1 if case == "a counter that starts at 1" else 0
    count = build("iota", shape=shape[1:], dtype="int64", start=start, step=1)
    if case == "the same label in all rows":
        label = build.constant(5, "int64")
    if case == "a label of 32 bits":
        label = build.input((64, 1), "int32")
    is_label = build("eq", count, label)
    if case == "before the label":
        is_label = build("lt", count, label)
    centred = build("sub", x, build("amax", x, dims=(1,), keepdim=True))
    less = build("sub", centred, build("cast", is_label, dtype="float32"))
    results = [is_label] if case == "the condition is a result" else []
    return build.graph(build("cast", less, dtype="float16"), *results)


@pytest.mark.parametrize(
    "case",
    [
        "a counter that starts at 1",
        "the same label in all rows",
        "a label of 32 bits",
        "before the label",
        "the condition is a result",
    ],
)
def test_other_conditions_are_not_split(case: str) -> None:
    assert "else:" not in source(_unsplit_graph(case))
