"""Tests of maxima and minima that accumulate in fp16, two values in an instruction."""

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

pytest.importorskip("triton")
pytest.importorskip("torch")

PLAN = KernelPlan("shared", 1, (1024,), 4, async_copies=True)
SHAPE = (64, 4096)


def subtracted_extremum(dtype: str, is_cast: bool, op: str = "amax") -> Graph:
    build = Builder()
    x = value = build.input(SHAPE, dtype)
    if is_cast:
        value = build("cast", x, dtype="float32")
    centred = build("sub", value, build(op, value, dims=(1,), keepdim=True))
    return build.graph(build("cast", centred, dtype=dtype))


@pytest.mark.parametrize("is_oldest", [False, True])
@pytest.mark.parametrize("is_cast", [False, True])
@pytest.mark.parametrize("op", ["amax", "amin"])
def test_fp16_values_are_compared_in_pairs(
    op: str, is_cast: bool, is_oldest: bool, tmp_path: Path
) -> None:
    program = emit_program(subtracted_extremum("float16", is_cast, op), PLAN)
    assert "gl.float16, row)\n" in program.source
    if is_oldest:
        ((cubin, _),) = oldest_triton.compile_program(program, tmp_path)
    else:
        cubin = compile_program(program, tmp_path).cubin
    codes = Counter(code.split(".")[0] for code in cubin_opcodes(cubin))
    # Reductions across threads and warps compare single values.
    assert codes["FMNMX"] == 0
    assert codes["HMNMX2"] + codes["VHMNMX"] > 0


def _fp32_accumulated(case: str) -> Graph:
    build = Builder()
    x = build.input(SHAPE, "float16")
    value = build("cast", x, dtype="float32")
    op = "sum" if case == "a sum" else "amax"
    if case == "something computed":
        value = build("mul", value, build.constant(1.5))
    if case == "32 bits in memory":
        value = build.input(SHAPE, "float32")
    if case == "bf16 in memory":
        value = build("cast", build.input(SHAPE, "bfloat16"), dtype="float32")
    if case == "8 bits in memory":
        value = build("cast", build.input(SHAPE, "float8_e5m2"), dtype="float32")
    if case == "rounded on the way":
        value = build("cast", build("cast", x, dtype="bfloat16"), dtype="float32")
    highest = build(op, value, dims=(1,), keepdim=True)
    return build.graph(build("cast", build("sub", value, highest), dtype="float16"))


@pytest.mark.parametrize(
    "case",
    [
        "a sum",
        "something computed",
        "32 bits in memory",
        "bf16 in memory",
        "8 bits in memory",
        "rounded on the way",
    ],
)
def test_other_reductions_accumulate_in_fp32(case: str) -> None:
    assert (
        "gl.float32, row)\n"
        in emit_program(_fp32_accumulated(case), KernelPlan("shared", 1, (1024,), 4)).source
    )
