"""A maximum and the sum of exp(x - maximum) in one walk over the columns."""

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
from nostall.fusion.codegen.loops.online_softmax import online_pairs
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
from nostall.tuning.source import compile_triton
from tests.unit.fusion.codegen.online_rows import (
    DAMAGES,
    PEELED_DAMAGES,
    cross_entropy,
    lse_and_softmax,
    reduce_row,
    softmax,
)
from tests.unit.fusion.codegen.process import run_interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")

EXAMPLES = 4
WIDE = (64, 50257)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kernels")
    return run_interpreted("tests.unit.fusion.codegen.online_rows", folder, EXAMPLES)


def test_sums_are_right_in_rows_with_infinities_and_nan(interpreted: Any) -> None:
    wrong, paired = interpreted["rows"]
    assert wrong == []
    assert paired >= 3


def test_rows_at_odd_places_are_read_and_written_within_their_tensors(interpreted: Any) -> None:
    wrong, kernels = interpreted["odd"]
    assert wrong == []
    assert kernels >= EXAMPLES // 2


def test_damaged_kernels_are_found(interpreted: Any) -> None:
    peeled = ("broken peeled", PEELED_DAMAGES), ("broken on chip", PEELED_DAMAGES)
    for key, damages in (("broken", DAMAGES), *peeled):
        assert interpreted[key].keys() == damages.keys()
        assert [name for name, wrong in interpreted[key].items() if not wrong] == []


def _of(graph: Graph) -> Schedule:
    return schedule_operators(graph, graph.operators)


def _walks(schedule: Schedule) -> int:
    return sum(part.has_columns for part in passes(schedule))


@pytest.mark.parametrize("make", [cross_entropy, lse_and_softmax])
def test_rows_are_read_twice(make: Callable[..., Graph]) -> None:
    schedule = _of(make(WIDE, "float16"))
    assert _walks(schedule) == 2
    (pair,) = online_pairs(schedule)
    assert len(pair.maxima) == len(pair.sums) == (1 if make is cross_entropy else 2)
    split = emit(plan_kernel(schedule, KernelPlan("split", 1, (1024,), 4, 16)))
    assert len(split.launches) == len(passes(schedule))
    assert _walks(replace(schedule, allow_online_softmax=False)) == 3
    looped = emit(plan_kernel(schedule, KernelPlan("looped", 1, (1024,), 4))).source
    assert looped.count("for first in range(0, ") == 2
    assert looped.count("for first in") == 4  # whole turns, and what is left of the columns
    assert looped.count("_online(") == 3  # its definition, and one call in each loop of a walk


def test_what_is_written_between_maximum_and_sum_needs_a_walk_of_its_own() -> None:
    build = Builder()
    _, centred, total = softmax(build, build.input(WIDE))
    graph = build.graph(build("div", centred, total))
    assert len(online_pairs(_of(graph))) == 1
    graph = build.graph(build("exp", centred), total)
    assert online_pairs(_of(graph)) == ()
    assert _walks(_of(graph)) == 2


@pytest.mark.parametrize("other", ["another value", "exp2", "another shift", "a lowest value"])
def test_other_sums_are_no_pairs(other: str) -> None:
    build = Builder()
    x, y = build.input(WIDE), build.input(WIDE)
    shift = highest = reduce_row(build, "amin" if other == "a lowest value" else "amax", x)
    if other == "another shift":
        told = build("eq", build("abs", highest), build.constant(float("inf")))
        shift = build("where", told, build.constant(1.0), highest)
    centred = build("sub", y if other == "another value" else x, shift)
    powers = build("exp2" if other == "exp2" else "exp", centred)
    graph = build.graph(reduce_row(build, "sum", powers), build("add", x, y))
    assert online_pairs(_of(graph)) == ()


def test_two_softmaxes_need_each_other_to_save_a_walk() -> None:
    build = Builder()
    x, y = build.input(WIDE), build.input(WIDE)
    totals = [softmax(build, value)[2] for value in (x, y)]
    difference = build("sub", build("div", x, totals[0]), build("div", y, totals[1]))
    schedule = _of(build.graph(reduce_row(build, "sum", difference)))
    assert len(online_pairs(schedule)) == 2
    assert _walks(schedule) == 2


@pytest.mark.parametrize(
    "plan",
    [KernelPlan("looped", 1, (4096,), 16), KernelPlan("split", 1, (1024,), 4, 16, peeled=True)],
)
def test_they_compile(plan: KernelPlan, tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    program = emit(plan_kernel(_of(lse_and_softmax(WIDE, "float16")), plan))
    path.write_text(program.source)
    for kernel, launch in launch_specs(program).items():
        verdict = validate(compile_triton(path, kernel, launch, "sm_90").cubin)
        assert verdict.safe, verdict.findings[:3]


def test_rows_at_odd_places_are_accessed_16_bytes_at_a_time(tmp_path: Path) -> None:
    schedule = _of(cross_entropy(WIDE, "float16"))
    accesses = {}
    for is_peeled in (False, True):
        path = tmp_path / f"{is_peeled}.py"
        program = emit(
            plan_kernel(schedule, KernelPlan("looped", 1, (4096,), 16, peeled=is_peeled))
        )
        path.write_text(program.source)
        ((name, launch),) = launch_specs(program).items()
        cubin = compile_triton(path, name, launch, "sm_90").cubin
        codes = [i.opcode for i in SassProgram.from_cubin(cubin).kernel().instructions]
        accesses[is_peeled] = Counter(c for c in codes if c.startswith(("LDG", "STG")))
    narrow, wide = accesses[False], accesses[True]
    assert narrow["LDG.E.U16"] >= 16 and narrow["LDG.E.128"] == narrow["STG.E.128"] == 0
    # One load for each of three loops of a walk, and one store: before, among and behind whole
    # turns; what is beside them is branched around.
    assert wide["LDG.E.128"] == 2 * 3 and wide["STG.E.128"] == 3


@pytest.mark.parametrize("is_peeled", [False, True])
@pytest.mark.parametrize("scheme", ["looped", "split"])
def test_whole_turns_have_no_masks(scheme: str, is_peeled: bool) -> None:
    schedule = _of(cross_entropy(WIDE, "float16"))
    plans_ = {
        "looped": KernelPlan("looped", 1, (1024,), 4, peeled=is_peeled),
        "split": KernelPlan("split", 1, (1024,), 4, 16, peeled=is_peeled),
    }
    source = emit(plan_kernel(schedule, plans_[scheme])).source
    loops = re.findall(r"^( +)for first in .*:\n((?:\1 +.*\n)+)", source, re.MULTILINE)
    masked = ["mask=" in body for _, body in loops]
    assert masked == [True, False, True][not is_peeled :] * 2


def test_aligned_rows_are_not_peeled() -> None:
    even = _of(cross_entropy((64, 50304), "float16"))
    assert find_peeling(even) is None
    assert not any(plan.peeled for plan in plans(even).legal_plans)
    odd = _of(cross_entropy(WIDE, "float16"))
    assert find_peeling(odd) == Peeling(50257, 8)
    assert {plan.rows for plan in plans(odd).legal_plans if plan.peeled} == {1}
    assert str(KernelPlan("looped", 1, (4096,), 16, peeled=True)).endswith("16 warps, peeled")
