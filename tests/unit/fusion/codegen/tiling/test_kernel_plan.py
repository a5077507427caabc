"""Tests of loops, schedules, plans and source of stitched kernels (nothing is run)."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.fusion import BadFusion, Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.loops.axes import Axis, AxisMismatch, factors, new_axes, regroup, unify
from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule, build_schedule
from nostall.fusion.codegen.loops.views import AccessDraft, _merge_axes
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import first_illegal_reason, plans
from nostall.fusion.codegen.tiling.plan_variants import (
    VECTOR_ELEMENTS,
    plans_with_variants,
    single_chunk_kernels,
    with_eager_loads,
    with_evict_first,
)
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.codegen.tiling.tile_sizes import (
    MAX_IDLE_SHARE,
    MIN_CHUNK,
    equal_chunks,
    idle_share,
    mixed_chunks,
    next_power_of_two,
)
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.patterns import (
    PATTERNS,
    attention,
    attention_backward,
    layer_norm,
    norm_backward,
    softmax_outer,
)


def schedule_pattern(graph: Graph) -> Schedule:
    return build_schedule(map_pattern(graph, graph.operators))


# -- loops -----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(("columns", "varying"), [(128, None), (100, None), (128, 17)])
def test_only_incomplete_tiles_have_masks(columns: int, varying: int | None) -> None:
    build = Builder(varying)
    x = build.input((varying or 16, columns))
    program = emit(
        plan_kernel(
            schedule_pattern(build.graph(build("relu", x))), KernelPlan("thread", 1, (128,), 1)
        )
    )
    masked = varying is not None or columns == 100
    assert ("mask=inside" in program.source) == ("inside = " in program.source) == masked


def test_eager_flat_kernels_load_all_inputs_before_they_release_the_next_kernel() -> None:
    build = Builder()
    x, y = build.input((64, 128)), build.input((64, 128))
    schedule = schedule_pattern(build.graph(build("mul", build("tanh", build("exp", x)), y)))
    plain = KernelPlan("thread", 1, (128,), 1)
    variant = with_eager_loads(PlannedKernel(schedule, plain))
    assert variant is not None and str(variant) == "thread 1x128, 1 warps, early"
    lines = emit(variant).source.splitlines()
    body = [line.strip() for line in lines[lines.index("    _behind()") :]]
    reads = [at for at, line in enumerate(body) if "tl.load(" in line]
    assert reads == [3, 4] and body[5] == "_release()"
    assert "_release" not in emit(plan_kernel(schedule, plain)).source


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


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "chunks"),
    [
        (768, (512, 256)),
        (1000, (1024,)),
        (2500, (2048, 512)),
        (3000, (2048, 1024)),
        (5000, (4096, 1024)),
        (32000, (32768,)),
        (4096, (4096,)),
    ],
)
def test_mixed_chunks_are_powers_of_two(columns: int, chunks: tuple[int, ...]) -> None:
    assert mixed_chunks(columns) == chunks


@given(st.integers(1, 1 << 20))
def test_chunks_leave_few_idle_lanes_and_only_the_last_is_masked(columns: int) -> None:
    assert idle_share(columns, mixed_chunks(columns)) <= MAX_IDLE_SHARE
    if equal_chunks(columns)[0] > MIN_CHUNK:
        assert idle_share(columns, equal_chunks(columns)) <= MAX_IDLE_SHARE
    for chunks in (mixed_chunks(columns), equal_chunks(columns)):
        assert sum(chunks[:-1]) < columns
        assert list(chunks) == sorted(chunks, reverse=True)
        assert all(width.bit_count() == 1 for width in chunks)
    assert len(set(equal_chunks(columns))) == 1
    assert len(equal_chunks(columns)) < 2 / MAX_IDLE_SHARE


def test_equal_chunks_are_combined_before_one_reduction() -> None:
    schedule = schedule_pattern(layer_norm((64, 3000), "float16"))
    source = emit(plan_kernel(schedule, KernelPlan("block", 1, (1024,) * 3, 4))).source
    mixed = emit(plan_kernel(schedule, KernelPlan("block", 1, (2048, 1024), 4))).source
    assert source.count("tl.sum(") == 2 and mixed.count("tl.sum(") == 4


def test_the_chunk_table_of_the_documentation_is_up_to_date() -> None:
    text = (Path(__file__).parents[5] / "docs" / "explanation" / "codegen.md").read_text()
    cell, percent = r"([\d +x]+) \| ", r"([\d.]+) % \|"
    row = rf"^\| (\d+) \| {percent} {cell}{percent} {cell}{percent}$"
    rows = re.findall(row, text, re.M)
    assert len(rows) >= 8
    for columns, one, equal, idle, fewest, masked in rows:
        count = int(columns)
        chunks = equal_chunks(count)
        assert equal == (f"{len(chunks)} x {chunks[0]}" if len(chunks) > 1 else str(chunks[0]))
        assert fewest == " + ".join(map(str, mixed_chunks(count)))
        assert one == f"{100 * idle_share(count, (next_power_of_two(count),)):.1f}"
        assert idle == f"{100 * idle_share(count, chunks):.1f}"
        assert masked == f"{100 * idle_share(count, mixed_chunks(count)):.1f}"


def test_chunks_with_many_masked_lanes_are_illegal() -> None:
    space = plans(schedule_pattern(layer_norm((64, 3000), "float16")))
    reasons = {r.reason for r in space.illegal if r.plan.chunks == (4096,)}
    assert "27% of the lanes would be masked; 6.2% are possible" in reasons
    assert {(2048, 1024), (1024,) * 3} <= {plan.chunks for plan in space.legal_plans}


def test_single_chunk_plans_are_only_variants() -> None:
    schedule = schedule_pattern(layer_norm((64, 3000), "float16"))
    plan = KernelPlan("block", 1, (1024,) * 3, 4, eager_loads=True)
    wide, half = (kernel.plan for kernel in single_chunk_kernels(PlannedKernel(schedule, plan)))
    assert wide == KernelPlan("block", 1, (4096,), 16, eager_loads=True)
    assert wide.elements_per_thread == VECTOR_ELEMENTS
    assert half == replace(wide, num_warps=8)
    assert replace(wide, eager_loads=False) not in plans(schedule).legal_plans
    assert "mask=inside" in emit(plan_kernel(schedule, wide)).source
    assert single_chunk_kernels(PlannedKernel(schedule, wide)) == ()
    assert single_chunk_kernels(PlannedKernel(schedule, KernelPlan("looped", 1, (1024,), 4))) == ()


def test_evict_first_requires_outputs_larger_than_l2() -> None:
    build = Builder()
    x = build.input((16384, 2048), "float16")
    total = build("sum", x, dims=(1,), keepdim=True)
    graph = build.graph(total, build("add", x, total))
    schedule, plan = schedule_pattern(graph), KernelPlan("block", 1, (2048,), 4)
    variant = with_evict_first(PlannedKernel(schedule, plan))
    assert variant is not None and str(variant) == "block 1x2048, 4 warps, streamed"
    assert variant not in plans(schedule).legal and variant in plans_with_variants(schedule)
    stores = [line for line in emit(variant).source.splitlines() if "tl.store(" in line]
    assert ["evict_first" in line for line in stores] == [False, True]
    assert "evict_first" not in emit(plan_kernel(schedule, plan)).source
    assert with_evict_first(PlannedKernel(schedule, KernelPlan("looped", 1, (1024,), 4))) is None
    fewer = schedule_pattern(layer_norm((8192, 2048), "float16"))
    assert with_evict_first(PlannedKernel(fewer, plan)) is None
    with pytest.raises(BadFusion, match="outputs of more than 37 MB"):
        emit(plan_kernel(fewer, replace(plan, evict_first=True)))


def test_flat_kernels_store_large_outputs_behind_a_barrier() -> None:
    build = Builder()
    x = build.input((16384, 2048), "float16")
    graph = build.graph(build("exp", x), build("relu", x))
    schedule, plan = schedule_pattern(graph), KernelPlan("thread", 1, (1024,), 4, eager_loads=True)
    lines = [
        line.strip()
        for line in emit(plan_kernel(schedule, replace(plan, evict_first=True))).source.splitlines()
    ]
    at = lines.index("tl.debug_barrier()")
    stores = [number for number, line in enumerate(lines) if line.startswith("tl.store(")]
    assert stores == [at + 1, at + 2]
    assert all("evict_first" in lines[number] for number in stores)
    assert "debug_barrier" not in emit(plan_kernel(schedule, plan)).source


def test_a_block_can_keep_a_row_of_32000_in_registers() -> None:
    space = plans(schedule_pattern(layer_norm((64, 32000), "float16")))
    assert any((p.scheme, p.chunks) == ("block", (32768,)) for p in space.legal_plans)
    reasons = [r.reason for r in space.illegal if r.plan == KernelPlan("block", 1, (32768,), 2)]
    assert len(reasons) == 1
    assert "255 at 64 threads" in reasons[0]


def test_illegal_plans_are_not_emitted() -> None:
    schedule = schedule_pattern(layer_norm((64, 3000), "float16"))
    (plan,) = [r.plan for r in plans(schedule).illegal if str(r.plan) == "warp 64x1024x3, 1 warps"]
    with pytest.raises(BadFusion, match="take one of"):
        emit(plan_kernel(schedule, plan))


# -- source ----------------------------------------------------------------------------------------


def test_eager_loads_include_operands_that_all_rows_share() -> None:
    schedule = schedule_pattern(layer_norm((64, 128), "float16"))
    plan = KernelPlan("block", 1, (128,), 4)
    variant = with_eager_loads(PlannedKernel(schedule, plan))
    assert variant is not None and str(variant) == "block 1x128, 4 warps, early"
    lines = emit(variant).source.splitlines()
    at = [number for number, line in enumerate(lines) if "tl.load(" in line]
    assert lines[at[0]].lstrip().startswith("x0 = ") and len(at) == 3
    assert at[-1] < next(number for number, line in enumerate(lines) if "tl.sum(" in line)
    late = emit(plan_kernel(schedule, plan)).source
    assert late.rfind("tl.load(") > late.rfind("tl.sum(")


@pytest.mark.parametrize("scheme", ["looped", "shared", "split"])
def test_schemes_without_register_rows_have_no_eager_loads(scheme: str) -> None:
    schedule = schedule_pattern(layer_norm((64, 1024), "float16"))
    assert with_eager_loads(PlannedKernel(schedule, KernelPlan(scheme, 1, (256,), 4))) is None  # type: ignore[arg-type]


def test_eager_loads_of_rows_precede_the_release_of_the_next_kernel() -> None:
    schedule = schedule_pattern(softmax_outer((2, 24, 32), "float32"))
    plan = KernelPlan("warp", 8, (32,), 1)
    variant = with_eager_loads(PlannedKernel(schedule, plan))
    assert variant is not None
    lines = [line.strip() for line in emit(variant).source.splitlines()]
    at = lines.index("_release()")
    assert "_behind()" in lines[:at]
    loads = [place for place, line in enumerate(lines) if "tl.load(" in line]
    assert loads and max(loads) < at < next(n for n, line in enumerate(lines) if "_max" in line[8:])
    assert "_release" not in emit(plan_kernel(schedule, plan)).source


def test_equal_patterns_and_plans_give_equal_bytes() -> None:
    schedule, equal_schedule = (
        schedule_pattern(layer_norm((64, 3000), "float16")) for _ in range(2)
    )
    sources = {emit(plan_kernel(schedule, plan)).source for plan in plans(schedule).legal_plans}
    assert len(sources) == len(plans(schedule).legal_plans)
    assert sources == {
        emit(plan_kernel(equal_schedule, plan)).source for plan in plans(equal_schedule).legal_plans
    }


def test_the_source_of_a_small_graph() -> None:
    build = Builder()
    x, bias = build.input((32, 256), "float16"), build.input((256,), "float16")
    total = build("sum", build("add", x, bias), dims=(1,), keepdim=True)
    schedule = schedule_pattern(build.graph(total))
    source = emit(plan_kernel(schedule, KernelPlan("warp", 4, (256,), 4))).source
    body = source[source.index("    pid") :]
    assert (
        body
        == """\
    pid = tl.program_id(0)
    r = pid * 4 + tl.arange(0, 4)[:, None]
    live = r < count
    c = tl.arange(0, 256)[None, :]
    x0 = tl.load(p0 + r * 256 + c, mask=live).to(tl.float32)
    # %2 = add(%0, %1) float16 32x256
    x1 = tl.load(p1 + c).to(tl.float32)
    v2 = x0 + x1
    # %3 = sum(%2, dims=(1,), keepdim=True) float16 32x1
    s3 = tl.sum(v2, 1, keep_dims=True)
    v3 = s3
    tl.store(p3 + r, v3.to(tl.float16), mask=live)
"""
    )
