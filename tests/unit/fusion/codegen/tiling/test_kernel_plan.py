"""Tests of plans of stitched kernels and of their source (nothing is run)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.fusion.chains.stitched import plans_with_variants
from hypothesis import given
from hypothesis import strategies as st

from nostall.fusion import BadFusion, Builder
from nostall.fusion.codegen.autotune.candidates import (
    VECTOR_ELEMENTS,
    single_chunk_kernels,
    with_eager_loads,
    with_evict_first,
)
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.codegen.tiling.tile_sizes import (
    MAX_IDLE_SHARE,
    MIN_CHUNK,
    equal_chunks,
    idle_share,
    mixed_chunks,
    next_power_of_two,
)
from tests.unit.fusion.codegen.graphs.schedules import schedule_pattern
from tests.unit.fusion.patterns import layer_norm, softmax_outer


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
