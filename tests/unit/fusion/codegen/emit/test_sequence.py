"""Small dots with vectors by turns of a few places of a sequence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.codegen.tiling.sequence_tiles import SequenceTiling, find_sequence_tiling
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph
from nostall.sass import Program as SassProgram
from nostall.sass import validate
from nostall.tuning.sources.triton_source import compile_triton
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.interpreted.sequence_layouts import (
    DAMAGES,
    ROWS,
    attention_scores,
    query_attention,
    query_from_sequence,
    sequence_plans,
    softmax,
    sum_of_softmaxes,
)
from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.fusion.codegen.sm90_code import opcodes
from tests.unit.fusion.patterns import attention, attention_backward, pooling

pytest.importorskip("triton")
pytest.importorskip("torch")

MODULE = "tests.unit.fusion.codegen.interpreted.sequence_layouts"
FEW_EXAMPLES, EXAMPLES = 1, 12


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_interpreted(MODULE, tmp_path_factory.mktemp("kernels"), FEW_EXAMPLES)


def test_the_kernel_of_the_shortest_query_is_correct_with_infinities_and_nan(few: Any) -> None:
    assert few["sequences"] == [[], FEW_EXAMPLES]


@pytest.mark.slow
def test_sequence_kernels_are_correct_with_infinities_and_nan(tmp_path: Path) -> None:
    wrong, kernels = run_interpreted(MODULE, tmp_path, EXAMPLES)["sequences"]
    assert wrong == []
    assert kernels > EXAMPLES


def test_damaged_kernels_are_detected(few: Any) -> None:
    assert few["broken"].keys() == DAMAGES.keys()
    assert [name for name, wrong in few["broken"].items() if not wrong] == []


def _schedule(graph: Graph) -> Schedule:
    return schedule_operators(graph, graph.operators)


def _untiled_reason(graph: Graph) -> str:
    """The reason why a graph has no sequence tiling; the scheme ``matrix`` must still be legal."""
    schedule = _schedule(graph)
    tiling = find_sequence_tiling(schedule)
    assert isinstance(tiling, str)
    assert {plan.scheme for plan in plans(schedule).legal_plans} == {"matrix"}
    (illegal,) = (one for one in plans(schedule).illegal if one.plan.scheme == "turned")
    assert illegal.reason == tiling
    with pytest.raises(BadFusion, match="does not fit"):
        emit(plan_kernel(schedule, illegal.plan))
    return tiling


def test_softmax_operators_are_classified() -> None:
    schedule = _schedule(query_attention(100, 64, "float16"))
    tiling = find_sequence_tiling(schedule)
    assert isinstance(tiling, SequenceTiling)
    ops = schedule.mapping.graph
    assert schedule.count(schedule.loop_groups[tiling.group]) == 100
    assert [ops[index].op for index in tiling.accumulated] == ["amax", "sum", "dot"]
    assert [ops[index].op for index in sorted(tiling.pass_through)] == ["div", "cast"]
    ((maximum, total),) = tiling.softmax_sums.items()
    assert (ops[maximum].op, ops[total].op) == ("amax", "sum")
    assert tiling.accumulated[-1] in tiling.needs_division and total not in tiling.needs_division


@pytest.mark.parametrize(
    ("length", "tile_sizes"), [(7, []), (9, [8]), (32, [8, 16]), (99, [8, 16, 32])]
)
def test_tiles_are_shorter_than_the_sequence(length: int, tile_sizes: list[int]) -> None:
    graph = query_attention(length, 24, "float16")
    schedule = _schedule(graph)
    tiles = [PlannedKernel(schedule, plan).positions_per_tile for plan in sequence_plans(graph)]
    assert tiles == tile_sizes
    assert any(plan.scheme == "matrix" for plan in plans(schedule).legal_plans)
    assert sum(plan.scheme == "turned" for plan in plans(schedule).legal_plans) <= 9


def test_the_sequence_axis_is_tiled_even_if_it_is_shorter_than_the_width() -> None:
    schedule = _schedule(query_attention(9, 64, "float16"))
    tiling = find_sequence_tiling(schedule)
    assert isinstance(tiling, SequenceTiling)
    assert schedule.count(schedule.loop_groups[tiling.group]) == 9


def test_short_sequences_are_not_tiled() -> None:
    assert "is added up" in _untiled_reason(pooling((4, 2, 8), "float16"))


def test_operators_that_need_the_whole_softmax_are_not_tiled() -> None:
    build = Builder()
    x, query = build.input((ROWS, 100, 64), "float16"), build.input((ROWS, 1, 64), "float16")
    share, *_ = softmax(build, attention_scores(build, x, query, biased=False), "float16")
    made = build("dot", share, x)
    assert "an output that needs all positions first" in _untiled_reason(build.graph(made, share))
    squares = build("dot", build("mul", share, share), x)
    assert "needs all positions before it can compute one" in _untiled_reason(build.graph(squares))
    scaled = build("mul", share, build.constant(1e5))
    narrow = build("cast", scaled, dtype="bfloat16")
    # This cast may overflow to infinity, so it cannot be left out.
    assert "needs all positions" in _untiled_reason(
        build.graph(build("dot", narrow, x, dtype="bfloat16"))
    )


def test_sums_of_several_softmaxes_are_not_tiled_along_the_sequence() -> None:
    tiling = find_sequence_tiling(_schedule(sum_of_softmaxes()))
    assert isinstance(tiling, SequenceTiling)  # along the width of the query
    assert not tiling.scaled_by


@pytest.mark.parametrize("count", [1, 8])
def test_loads_with_and_without_positions_have_different_names(count: int, tmp_path: Path) -> None:
    schedule = _schedule(query_from_sequence(count))
    program = emit(plan_kernel(schedule, sequence_plans(schedule.mapping.graph)[0]))
    assert opcodes(program, tmp_path)
    assert {"x0 = ", "x0at1 = "} <= set(re.findall(r"x0\w* = ", program.source))


def test_matrix_products_are_not_tiled() -> None:
    assert "product of matrices" in _untiled_reason(attention((2, 3, 20, 24), "float16"))
    assert "product of matrices" in _untiled_reason(attention_backward((2, 3, 20, 24), "float16"))


def test_exponentials_without_a_sum_are_not_tiled() -> None:
    build = Builder()
    x, query = build.input((ROWS, 100, 64)), build.input((ROWS, 1, 64))
    scores = attention_scores(build, x, query, biased=False)
    centred = build("sub", scores, build("amax", scores, dims=(2,), keepdim=True))
    graph = build.graph(build("dot", build("exp", centred), x))
    assert "exponentials have no sum" in _untiled_reason(graph)


def test_sequence_plans_are_modelled_and_are_autotuning_candidates() -> None:
    schedule = _schedule(query_attention(100, 64, "float16"))
    assert "turned" in {kernel.plan.scheme for kernel in candidates(schedule, 1)}
    for plan in sequence_plans(schedule.mapping.graph):
        assert illegal_reason(schedule, plan) is None
        assert 0 < modelled_seconds(PlannedKernel(schedule, plan)) < 1
        assert str(plan) == f"turned 1x{plan.chunks[0]}, {plan.num_warps} warps"
    few, many = (
        _schedule(query_attention(16, 64, "float16")),
        _schedule(query_attention(128, 64, "float16")),
    )
    plan = KernelPlan("turned", 1, (512,), 1)
    assert modelled_seconds(PlannedKernel(few, plan)) < modelled_seconds(PlannedKernel(many, plan))


def _loop_opcodes(cubin: bytes) -> list[str]:
    """The opcodes of the only loop of a kernel: a basic block that is its own successor."""
    kernel = SassProgram.from_cubin(cubin).kernel()
    codes = [one.opcode for one in kernel.instructions]
    blocks = enumerate(kernel.blocks)
    (loop,) = (one for at, one in blocks if at in one.succ and len(one) > 1)
    return codes[loop.start : loop.end]


def test_the_loop_of_a_single_warp_uses_no_shared_memory(tmp_path: Path) -> None:
    """With both Triton versions. Layout conversions of query and result are outside the loop."""
    schedule = _schedule(query_attention(100, 64, "float16"))
    program = emit(plan_kernel(schedule, KernelPlan("turned", 1, (512,), 1)))
    ((name, launch),) = launch_specs(program).items()
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    cubins = [compile_triton(path, name, launch, "sm_90").cubin]
    assert validate(cubins[0]).safe
    if oldest_triton.INSTALLATION.is_dir():
        ((cubin, _),) = oldest_triton.compile_program(program, tmp_path)
        cubins.append(cubin)
    for cubin in cubins:
        loop = _loop_opcodes(cubin)
        assert not [code for code in loop if code.startswith(("STS", "LDS", "BAR", "LDL", "STL"))]
        # A thread loads two vectors of 16 bytes and the bias of its two positions.
        assert sum(code == "LDG.E.128" for code in loop) == 2
        assert sum(code.startswith("SHFL") for code in loop) == 2 * 3
