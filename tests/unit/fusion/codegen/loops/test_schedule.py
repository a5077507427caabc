"""Loops of stitched kernels: axes, views, reductions, and patterns without a kernel."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.fusion import BadFusion, Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.loops.mapping import (
    AccessDraft,
    Axis,
    AxisMismatch,
    _merge_axes,
    factors,
    new_axes,
    regroup,
    unify,
)
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import first_illegal_reason, plans
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from tests.unit.fusion.codegen.graphs.schedules import schedule_pattern
from tests.unit.fusion.pattern_tables import PATTERNS
from tests.unit.fusion.patterns import attention, attention_backward, norm_backward


def test_axes_split_at_their_common_factors() -> None:
    wide, batch, heads, width = Axis(24), Axis(5), Axis(4), Axis(6)
    unify((batch, wide), (Axis(5), heads, width))
    assert [axis.size for axis in factors((batch, wide))] == [5, 4, 6]
    assert factors((wide,)) == factors((heads, width))


def test_axes_without_common_factors_are_rejected() -> None:
    with pytest.raises(AxisMismatch):
        unify((Axis(6), Axis(4)), (Axis(4), Axis(6)))
    with pytest.raises(AxisMismatch):
        regroup((Axis(6), Axis(4)), (4, 6))


@given(st.lists(st.integers(2, 6), min_size=1, max_size=5), st.randoms())
def test_regrouping_keeps_loops(sizes: list[int], random: object) -> None:
    row = tuple(Axis(size) for size in sizes)
    merged = Axis(1)
    for axis in row:
        merged = Axis(merged.size * axis.size)
    groups = regroup((merged,), sizes)
    assert [axis.size for group in groups for axis in group] == sizes
    assert factors((merged,)) == tuple(axis for group in groups for axis in group)


def test_a_view_between_operators_splits_loops() -> None:
    schedule = schedule_pattern(PATTERNS["heads"]())
    assert [schedule.mapping.loop_sizes[loop] for loop in schedule.columns] == [16]
    assert schedule.row_count == 2 * 4


def test_loops_follow_the_memory_layout() -> None:
    """The loops over a transposed tensor follow its strides."""
    build = Builder()
    x = build.input((8, 16, 4), strides=(4, 32, 1))
    graph = build.graph(build("relu", x, strides=(4, 32, 1)))
    program = emit(plan_kernel(schedule_pattern(graph), KernelPlan("thread", 1, (128,), 1)))
    assert "tl.load(p0 + c)" in program.source


def test_the_size_limit_of_dots_is_lower_in_fp32() -> None:
    """Triton unrolls the products of fp32 dots."""
    wide = schedule_pattern(attention_backward((64, 8, 64, 64), "float32"))
    assert "products in fp32" in str(first_illegal_reason(wide))
    narrow = schedule_pattern(attention_backward((64, 8, 64, 64), "float16"))
    assert {plan.scheme for plan in plans(narrow).legal_plans} == {"matrix"}


AXES = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 2), st.integers(1, 4))


@given(st.lists(AXES, min_size=1, max_size=4))
def test_merged_axes_have_a_single_step(
    axes: list[tuple[int, int, int, int]],
) -> None:
    """``axes`` are neighbouring axes (size, start, step, count) that are merged into one."""
    run, positions = [], [0]
    for size, start, step, count in axes:
        long = start + step * (count - 1) + size
        run.append((long, AccessDraft(new_axes(count), start, step)))
        positions = [at * long + start + step * i for at in positions for i in range(count)]
    merged = _merge_axes(run)
    steps = {b - a for a, b in pairwise(positions)}
    if merged is None:
        assert len(steps) > 1
    else:
        count = math.prod(axis.size for axis in merged.axes)
        assert positions == [merged.start + merged.step * i for i in range(count)]


def test_long_axes_of_dots_are_rejected() -> None:
    with pytest.raises(BadFusion, match="300 along an axis"):
        schedule_pattern(attention((2, 2, 300, 16), "float16"))


def test_reductions_across_the_batch_of_a_dot_are_rejected() -> None:
    build = Builder()
    x = build.input((4, 3, 12, 16))
    made = build("dot", x, build.input((4, 3, 16, 16)))
    graph = build.graph(build("amax", made, dims=(1, 3), keepdim=True))
    with pytest.raises(BadFusion, match="one element of the batch"):
        schedule_pattern(graph)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda b, x: b("add", b("exp", x), b("permute", b("exp", x), dims=(1, 0))), None),
        (lambda b, x: _value_and_transpose(b, x), "diagonal"),
        (lambda b, x: b("relu", b("view", b("exp", x), shape=(2, 18))), None),
        (lambda b, x: _incompatible_views(b, x), "without common factors"),
        (lambda b, x: b("relu", _first_half(b, b("exp", x))), "reads a part"),
        (lambda b, x: b("relu", b("cast", x, dtype="float64")), "float64"),
        (lambda b, x: b("dot", x, x), "no batch"),
        (lambda b, x: b("amax", b("isnan", x), dims=(0,), keepdim=False), "no amax of bools"),
    ],
)
def test_unsupported_patterns_raise_with_a_reason(make: object, reason: str | None) -> None:
    build = Builder()
    x = build.input((6, 6))
    graph = build.graph(make(build, x))  # type: ignore[operator]
    if reason is None:
        assert schedule_pattern(graph).mapping.outputs
    else:
        with pytest.raises(BadFusion, match=reason):
            schedule_pattern(graph)


def _value_and_transpose(build: Builder, x: int) -> int:
    made = build("exp", x)
    return build("add", made, build("permute", made, dims=(1, 0)))


def _incompatible_views(build: Builder, x: int) -> int:
    made = build("exp", x)
    as_rows = build("relu", build("view", made, shape=(4, 9)))
    return build("add", as_rows, build("view", build("exp", made), shape=(4, 9)))


def _first_half(build: Builder, x: int) -> int:
    return build("slice", x, shape=(6, 3), dim=1, start=0, step=1)


def test_row_reductions_that_rows_depend_on_are_rejected() -> None:
    build = Builder()
    x = build.input((6, 10))
    by_row = build("sub", x, build("sum", x, dims=(1,), keepdim=True))
    graph = build.graph(build("sub", by_row, build("sum", by_row, dims=(0,), keepdim=True)))
    with pytest.raises(BadFusion, match="sum over rows within the rows"):
        schedule_pattern(graph)


def test_sums_over_rows_are_row_reductions() -> None:
    graph = norm_backward((3, 7, 80), "float16")
    schedule = schedule_pattern(graph)
    assert schedule.kind == "dual"
    assert {graph[i].op for i in schedule.row_reductions} == {"sum"}
    assert len(schedule.row_reductions) == 2
    assert {graph[i].op for i in schedule.epilogue} == {"cast"}


def test_a_row_reduction_can_read_its_operand_from_memory() -> None:
    """The gradient of a bias reads its operand from memory."""
    build = Builder()
    dy, x = build.input((64, 96)), build.input((64, 96))
    along = build("sum", build("mul", dy, x), dims=(1,), keepdim=True)
    dx = build("mul", x, along)
    schedule = schedule_pattern(build.graph(dx, build("sum", dy, dims=(0,), keepdim=False)))
    assert schedule.kind == "dual"
    assert plans(schedule).legal_plans
