"""Online softmax, and loop peeling of the unaligned rows that it usually has (vocabularies)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.online_reductions import online_pairs
from nostall.fusion.codegen.loops.reduction_levels import passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import Peeling, find_peeling
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.sass import Program as SassProgram
from nostall.sass import validate
from nostall.tuning.sources.triton_source import compile_triton
from tests.unit.fusion.codegen.interpreted.online_rows import (
    DAMAGES,
    PEELED_DAMAGES,
    cross_entropy,
    lse_and_softmax,
    reduce_row,
    softmax,
)
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")

pytestmark = pytest.mark.slow

EXAMPLES = 4
WIDE = (64, 50257)


@pytest.fixture(scope="module")
def interpreter_results(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kernels")
    return run_interpreted("tests.unit.fusion.codegen.interpreted.online_rows", folder, EXAMPLES)


def test_sums_are_right_in_rows_with_infinities_and_nan(interpreter_results: Any) -> None:
    wrong, kernels_with_pairs = interpreter_results["rows"]
    assert wrong == []
    assert kernels_with_pairs >= 3


def test_unaligned_rows_are_read_and_written_within_their_tensors(interpreter_results: Any) -> None:
    wrong, kernels = interpreter_results["odd"]
    assert wrong == []
    assert kernels >= EXAMPLES // 2


def test_damaged_kernels_give_wrong_results(interpreter_results: Any) -> None:
    peeled_cases = ("broken peeled", PEELED_DAMAGES), ("broken on chip", PEELED_DAMAGES)
    for key, damages in (("broken", DAMAGES), *peeled_cases):
        assert interpreter_results[key].keys() == damages.keys()
        assert [name for name, wrong in interpreter_results[key].items() if not wrong] == []


def _schedule(graph: Graph) -> Schedule:
    return schedule_operators(graph, graph.operators)


def _count_column_loops(schedule: Schedule) -> int:
    return sum(column_pass.has_columns for column_pass in passes(schedule))


@pytest.mark.parametrize("make", [cross_entropy, lse_and_softmax])
def test_rows_are_read_twice_rather_than_three_times(make: Callable[..., Graph]) -> None:
    schedule = _schedule(make(WIDE, "float16"))
    assert _count_column_loops(schedule) == 2
    (pair,) = online_pairs(schedule)
    assert len(pair.maxima) == len(pair.sums) == (1 if make is cross_entropy else 2)
    split = emit(plan_kernel(schedule, KernelPlan("split", 1, (1024,), 4, 16)))
    assert len(split.launches) == len(passes(schedule))
    assert _count_column_loops(replace(schedule, allow_online_softmax=False)) == 3
    looped = emit(plan_kernel(schedule, KernelPlan("looped", 1, (1024,), 4))).source
    # Full iterations, and the remaining columns; the second pass runs backwards.
    assert re.findall(r"for (?:first|at) in range\((\d+), ", looped) == [
        "0", "50176", "50176", "0"
    ]  # fmt: skip
    assert looped.count("_online(") == 3  # definition, and one call in each of two loops


def test_an_output_between_maximum_and_sum_needs_a_loop_of_its_own() -> None:
    build = Builder()
    _, centered, total = softmax(build, build.input(WIDE))
    graph = build.graph(build("div", centered, total))
    assert len(online_pairs(_schedule(graph))) == 1
    graph = build.graph(build("exp", centered), total)
    assert online_pairs(_schedule(graph)) == ()
    assert _count_column_loops(_schedule(graph)) == 2


@pytest.mark.parametrize("case", ["another value", "exp2", "another shift", "a lowest value"])
def test_other_sums_are_no_pairs(case: str) -> None:
    build = Builder()
    x, y = build.input(WIDE), build.input(WIDE)
    shift = highest = reduce_row(build, "amin" if case == "a lowest value" else "amax", x)
    if case == "another shift":
        is_infinite = build("eq", build("abs", highest), build.constant(float("inf")))
        shift = build("where", is_infinite, build.constant(1.0), highest)
    centered = build("sub", y if case == "another value" else x, shift)
    exponentials = build("exp2" if case == "exp2" else "exp", centered)
    graph = build.graph(reduce_row(build, "sum", exponentials), build("add", x, y))
    assert online_pairs(_schedule(graph)) == ()


def test_two_softmaxes_save_a_pass_only_together() -> None:
    build = Builder()
    x, y = build.input(WIDE), build.input(WIDE)
    totals = [softmax(build, value)[2] for value in (x, y)]
    difference = build("sub", build("div", x, totals[0]), build("div", y, totals[1]))
    schedule = _schedule(build.graph(reduce_row(build, "sum", difference)))
    assert len(online_pairs(schedule)) == 2
    assert _count_column_loops(schedule) == 2


@pytest.mark.parametrize(
    "plan",
    [KernelPlan("looped", 1, (4096,), 16), KernelPlan("split", 1, (1024,), 4, 16, peeled=True)],
)
def test_kernels_with_online_softmax_compile(plan: KernelPlan, tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    program = emit(plan_kernel(_schedule(lse_and_softmax(WIDE, "float16")), plan))
    path.write_text(program.source)
    for kernel, launch in launch_specs(program).items():
        verdict = validate(compile_triton(path, kernel, launch, "sm_90").cubin)
        assert verdict.safe, verdict.findings[:3]


def test_peeled_kernels_access_unaligned_rows_16_bytes_at_a_time(tmp_path: Path) -> None:
    schedule = _schedule(cross_entropy(WIDE, "float16"))
    accesses = {}
    for is_peeled in (False, True):
        path = tmp_path / f"{is_peeled}.py"
        program = emit(
            plan_kernel(schedule, KernelPlan("looped", 1, (4096,), 16, peeled=is_peeled))
        )
        path.write_text(program.source)
        ((name, launch),) = launch_specs(program).items()
        cubin = compile_triton(path, name, launch, "sm_90").cubin
        opcodes = [i.opcode for i in SassProgram.from_cubin(cubin).kernel().instructions]
        accesses[is_peeled] = Counter(code for code in opcodes if code.startswith(("LDG", "STG")))
    unpeeled, peeled = accesses[False], accesses[True]
    assert unpeeled["LDG.E.U16"] >= 16 and unpeeled["LDG.E.128"] == unpeeled["STG.E.128"] == 0
    # Two passes load, the second one stores.  Each has three loops: before, in and after the full
    # iterations.
    assert peeled["LDG.E.128"] == 2 * 3 and peeled["STG.E.128"] == 3


@pytest.mark.parametrize("is_peeled", [False, True])
@pytest.mark.parametrize("scheme", ["looped", "split"])
def test_full_iterations_have_no_masks(scheme: str, is_peeled: bool) -> None:
    schedule = _schedule(cross_entropy(WIDE, "float16"))
    plan_by_scheme = {
        "looped": KernelPlan("looped", 1, (1024,), 4, peeled=is_peeled),
        "split": KernelPlan("split", 1, (1024,), 4, 16, peeled=is_peeled),
    }
    source = emit(plan_kernel(schedule, plan_by_scheme[scheme])).source
    loops = re.findall(r"^( +)for (?:first|at) in .*:\n((?:\1 +.*\n)+)", source, re.MULTILINE)
    masked = ["mask=" in body for _, body in loops]
    forward = [True, False, True][not is_peeled :]
    # The second pass of one kernel runs backwards.
    assert masked == [*forward, *(reversed(forward) if scheme == "looped" else forward)]


def test_aligned_rows_are_not_peeled() -> None:
    aligned = _schedule(cross_entropy((64, 50304), "float16"))
    assert find_peeling(aligned) is None
    assert not any(plan.peeled for plan in plans(aligned).legal_plans)
    unaligned = _schedule(cross_entropy(WIDE, "float16"))
    assert find_peeling(unaligned) == Peeling(50257, 8)
    assert {plan.rows for plan in plans(unaligned).legal_plans if plan.peeled} == {1}
    assert str(KernelPlan("looped", 1, (4096,), 16, peeled=True)).endswith("16 warps, peeled")
