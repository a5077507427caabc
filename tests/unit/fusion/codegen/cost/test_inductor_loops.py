"""Default plans beside Inductor's loops, for rows from one element to a million."""

from __future__ import annotations

from functools import cache

import pytest

pytest.importorskip("torch")

from benchmarks.fusion.chains.generated import KINDS
from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.stitched import chain_graph

from nostall.fusion.codegen.cost.default_plan import (
    LOOP_COLUMNS,
    MIN_SHARED_COLUMNS,
    default_plan,
    exceeds_inductor,
    inductor_row_reads,
    is_last_choice,
    loop_row_reads,
)
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel

ROW_KINDS = ("residual + rms norm", "softcap softmax", "cosine")
"""Kinds of chains that are one kernel with reductions over columns."""
SHAPES = (
    (4096, 1),
    (4096, 2),
    (65536, 128),
    (65536, 1000),
    (8192, 3000),
    (8192, 5120),
    (4096, 50304),
    (2048, 151936),
    (8, 151936),
    (256, 1 << 20),
    (1, 1 << 20),
)


@cache
def schedule_of(kind: str, rows: int, columns: int) -> Schedule:
    function, inputs = KINDS[kind]
    graph = chain_graph(Chain(kind, function, inputs(rows, columns)))  # type: ignore[arg-type]
    return schedule_operators(graph, graph.operators)


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_a_default_plan_reads_rows_as_often_as_inductor_at_most(
    kind: str, rows: int, columns: int
) -> None:
    kernel = default_plan(schedule_of(kind, rows, columns))
    assert not exceeds_inductor(kernel), kernel.plan
    if kernel.plan.scheme == "looped":
        assert kernel.plan.chunks[0] >= min(LOOP_COLUMNS, columns), kernel.plan
    if kernel.plan.scheme == "shared":
        assert columns >= MIN_SHARED_COLUMNS, kernel.plan


def test_one_warp_does_not_loop_over_a_row_of_a_vocabulary() -> None:
    for kind in ROW_KINDS:
        schedule = schedule_of(kind, 2048, 151936)
        assert exceeds_inductor(PlannedKernel(schedule, KernelPlan("looped", 1, (256,), 1)))
        assert default_plan(schedule).plan.num_warps >= 4


def test_rows_that_inductor_keeps_in_registers_are_read_once() -> None:
    schedule = schedule_of("softcap softmax", 65536, 1000)
    assert (loop_row_reads(schedule), inductor_row_reads(schedule)) == (2, 1)
    looped = [k for k in plans(schedule).legal if k.plan.scheme in ("looped", "split")]
    assert looped and all(exceeds_inductor(kernel) for kernel in looped)


def test_an_online_softmax_is_read_twice_and_a_norm_too() -> None:
    assert loop_row_reads(schedule_of("softcap softmax", 2048, 151936)) == 2
    assert loop_row_reads(schedule_of("rms norm", 2048, 151936)) == 2
    assert inductor_row_reads(schedule_of("rms norm", 2048, 151936)) == 2


def test_last_choices_stay_in_the_plan_space_for_tuning() -> None:
    schedule = schedule_of("rms norm", 8192, 3000)
    assert any(is_last_choice(kernel) for kernel in plans(schedule).legal)
