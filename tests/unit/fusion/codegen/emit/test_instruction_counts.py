"""Instruction counts of kernels compiled for sm_90 without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.async_copies import NUM_STAGES, async_copy_bytes
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.interpreted.online_rows import cross_entropy
from tests.unit.fusion.codegen.sm90_code import opcodes
from tests.unit.fusion.patterns import attention_backward, norm_backward, weighed_history

pytest.importorskip("triton")
pytest.importorskip("torch")


def written(graph: Graph, plan: KernelPlan) -> Program:
    return emit(plan_kernel(schedule_operators(graph, graph.operators), plan))


def count(codes: list[str], *starts: str) -> int:
    return sum(code.startswith(starts) for code in codes)


def test_exp_of_a_softmax_is_one_multiplication_and_ex2(tmp_path: Path) -> None:
    build = Builder()
    x = build.input((64, 2048))
    powers = build("exp", build("sub", x, build("amax", x, dims=(1,), keepdim=True)))
    total = build("sum", powers, dims=(1,), keepdim=True)
    graph = build.graph(build("div", powers, total))
    codes = opcodes(written(graph, KernelPlan("block", 1, (2048,), 4)), tmp_path)
    elements = 2048 // (32 * 4)
    assert count(codes, "MUFU.EX2") == elements
    # One before each exp, one for the division, and a few for each row.
    assert 2 * elements <= count(codes, "FMUL") < 2.5 * elements
    # An exp that handles subnormals would compare every value.
    assert count(codes, "FSETP") < elements / 2


@pytest.mark.parametrize("scheme", ["shared", "block"])
def test_counters_are_compared_in_32_bits(scheme: str, tmp_path: Path) -> None:
    graph = cross_entropy((64, 8000), "float16")
    plans = {
        "shared": KernelPlan("shared", 1, (2048,), 8),
        "block": KernelPlan("block", 1, (8192,), 8),
    }
    codes = opcodes(written(graph, plans[scheme]), tmp_path)
    elements = plans[scheme].chunks[0] // (32 * 8)
    # A 64-bit comparison would be two instructions, the second with .EX.
    assert count(codes, "ISETP.NE", "ISETP.EQ") >= elements
    assert not [c for c in codes if c.startswith(("ISETP.NE", "ISETP.EQ")) and c.endswith(".EX")]


def test_rows_of_later_iterations_are_copied_asynchronously(tmp_path: Path) -> None:
    graph = norm_backward((64, 16, 4096), "float16")
    plan = KernelPlan("column", 1, (4096,), 8, 16, async_copies=True)
    program = written(graph, plan)
    codes = opcodes(program, tmp_path)
    # Two inputs of 4096 columns; a copy of a thread has 8 elements.
    assert count(codes, "LDGSTS") >= NUM_STAGES * 2 * 4096 // (32 * 8 * 8)
    # The remaining loads are the weights, before the loop.
    assert count(codes, "LDG.") <= 4096 // (32 * 8 * 8)
    for _, shared in oldest_triton.compile_program(program, tmp_path)[:1]:
        assert shared >= async_copy_bytes(schedule_operators(graph, graph.operators), 4096)


@pytest.mark.parametrize(("width", "once"), [(128, True), (48, False)])
def test_values_that_rows_of_a_block_share_are_loaded_once(
    width: int, once: bool, tmp_path: Path
) -> None:
    graph = weighed_history((64, 200, width), "float16")
    pool = [index for index in graph.operators if graph[index].op in ("mul", "sum")][-2:]
    program = emit(plan_kernel(schedule_operators(graph, pool), KernelPlan("warp", 32, (256,), 4)))
    codes = opcodes(program, tmp_path)
    # A block of 32 rows lies within one sequence if the width is 128, but not if it is 48.
    values, weights = 32 * 200 // (32 * 4 * 8) + 1, 256 // (32 * 4)
    assert (count(codes, "LDG.") <= values + weights) == once


def test_column_major_rows_are_copied_asynchronously(tmp_path: Path) -> None:
    build = Builder()
    dy, x = build.input((4096, 768), "float16"), build.input((4096, 768), "float16")
    product = build("mul", build("cast", dy, dtype="float32"), x)
    graph = build.graph(build("sum", product, dims=(0,), keepdim=False))
    plan = KernelPlan("split", 64, (32,), 8, 16, async_copies=True)
    codes = opcodes(written(graph, plan), tmp_path)
    # 64 by 32 of each input are one access of 8 elements for each of 256 threads.
    assert count(codes, "LDGSTS") >= NUM_STAGES * 2
    assert not count(codes, "LDG.")


def test_all_matrices_are_loaded_before_the_first_dot(tmp_path: Path) -> None:
    graph = attention_backward((8, 4, 48, 64), "float16")
    codes = opcodes(written(graph, KernelPlan("matrix", 1, (4096,), 4)), tmp_path)
    reads = [at for at, code in enumerate(codes) if code.startswith("LDG.")]
    # Four of 48 by 64 and one of 48 by 48, twice.
    assert len(reads) >= 4 * 48 * 64 // (32 * 4 * 8)
    assert reads[-1] < next(at for at, code in enumerate(codes) if "MMA" in code)
