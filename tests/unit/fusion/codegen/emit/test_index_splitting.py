"""Which turns know that a label's column is not theirs, and what a compiler makes of that."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.on_chip import compiled, program_of
from tests.unit.fusion.codegen.sm90_code import opcodes_of
from tests.unit.fusion.patterns import cross_entropy

pytest.importorskip("triton")
pytest.importorskip("torch")

PLAN = KernelPlan("shared", 1, (1024,), 4, async_copies=True)
EACH = 8
"""Elements of a thread in a turn."""


def source(graph: Graph) -> str:
    return program_of(graph, PLAN).source


def test_turns_without_the_label_do_not_compare() -> None:
    text = source(cross_entropy((64, 4096), "float16"))
    assert text.count("    if (s8 >= at * 1024) & (s8 < at * 1024 + 1024):\n") == 1
    near, far = text.split("        else:\n")
    assert near.count("s8 = gl.sum(gl.sum(_within(x0), 1), 0)\n    for at in range(0, 4):\n") == 1
    assert near.count("v8 = lanes == (_within(x0) - at * 1024)") == 1
    assert far.count("v8 = gl.full((1, 1024), 0, gl.int1, row)") == 1


def test_turns_with_masks_compare() -> None:
    text = source(cross_entropy((64, 4100), "float16"))
    masked = text[text.index("for at in range(4, 5):", text.index("s8 = ")) :]
    assert "else" not in masked and "v8 = lanes == " in masked


@pytest.mark.parametrize("is_oldest", [False, True])
def test_what_follows_from_the_label_costs_other_turns_nothing(
    is_oldest: bool, tmp_path: Path
) -> None:
    program = program_of(cross_entropy((64, 4096), "float16"), PLAN)
    if is_oldest:
        ((cubin, _),) = oldest_triton.compiled(program, tmp_path)
    else:
        cubin = compiled(program, tmp_path).cubin
    codes = Counter(code.split(".")[0] for code in opcodes_of(cubin))
    # Where the label is: the one-hot vector, and the logarithm that is picked.
    assert codes["FSEL"] <= 2 * EACH + 2
    # exp in the pass of the sum; in that of the gradient, with the label and without it.
    assert codes["MUFU"] >= 3 * EACH


def _otherwise(case: str) -> Graph:
    build = Builder()
    shape = (64, 4096)
    x, label = build.input(shape, "float16"), build.input((64, 1), "int64")
    start = 1 if case == "a counter that begins with 1" else 0
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
        "a counter that begins with 1",
        "the same label in all rows",
        "a label of 32 bits",
        "before the label",
        "the condition is a result",
    ],
)
def test_other_conditions_are_made_in_every_turn(case: str) -> None:
    assert "else:" not in source(_otherwise(case))
