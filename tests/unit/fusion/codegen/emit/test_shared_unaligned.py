"""Tests of Gluon kernels that keep unaligned rows: source text and compiled code."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.fusion import Builder
from nostall.fusion.codegen.cost.gpu import blocks_per_sm
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import Peeling
from nostall.fusion.codegen.tiling.on_chip import rematerialization_options
from nostall.sass import Program as SassProgram
from nostall.sass import validate
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.interpreted.online_rows import cross_entropy
from tests.unit.fusion.codegen.on_chip import (
    all_operators_graph,
    compile_program,
    emit_program,
    shared_bytes,
)

pytest.importorskip("triton")
pytest.importorskip("torch")


def test_unaligned_rows_are_copied_by_lanes() -> None:
    """Copies have 16 bytes and may include lanes outside the row; interior chunks have no masks."""
    build = Builder()
    x = build.input((32, 5001), "float16")
    largest = build("amax", x, dims=(1,), keepdim=True)
    graph = build.graph(build("cast", build("sub", x, largest), dtype="float16"))
    program = emit_program(
        graph, KernelPlan("shared", 1, (1024,), 4, async_copies=True, peeled=True)
    )
    source = program.source
    assert (
        source[source.index("    base = ") : source.index("    v1 = ")]
        == """\
    base = pid * 5001 // 8 * 8
    ahead = pid * 5001 - base
    lowest = (ahead + 7) // 8 * 8
    highest = (ahead + 5001) // 8 * 8
    behind = ((count - 1) * 5001 + 5001 - base) // 8 * 8
    whole = gl.minimum((ahead + 5008) // 8 * 8, behind)
    # pass 0
    for at in range(0, 5):
        first = at * 1024
        lane = first + lanes
        c = lane - ahead
        inside = (c >= 0) & (c < 5001)
        copy_ahead(as_float16.index(at), p0 + base + lane, mask=lane < whole)
    async_copy.commit_group()
    async_copy.wait_group(0)
    if whole < ahead + 5001:
        at = whole // 1024
        first = at * 1024
        lane = first + lanes
        c = lane - ahead
        inside = (c >= 0) & (c < 5001)
        as_float16.index(at).store(gl.where(lane < whole, as_float16.index(at).load(row), \
gl.load(p0 + base + lane, mask=inside & (lane >= whole))))
    barrier()
    a1 = gl.full((1, 1024), float("-inf"), gl.float16, row)
    for end in range(0, 2):
        at = (end + 4) % 5
        first = at * 1024
        lane = first + lanes
        c = lane - ahead
        inside = (c >= 0) & (c < 5001)
        x0 = as_float16.index(at).load(row).to(gl.float32)
        # %1 = amax(%0, dims=(1,), keepdim=True) float16 32x1
        a1 = _max(a1, gl.where(inside, x0.to(gl.float16), float("-inf")))
    for at in range(1, 4):
        first = at * 1024
        lane = first + lanes
        c = lane - ahead
        x0 = as_float16.index(at).load(row).to(gl.float32)
        # %1 = amax(%0, dims=(1,), keepdim=True) float16 32x1
        a1 = _max(a1, x0.to(gl.float16))
"""
    )
    assert program.launches[0].aligned


@given(
    columns=st.integers(1, 3000),
    gap=st.sampled_from((0, 0, 3)),
    rows=st.integers(1, 40),
    width=st.sampled_from((64, 256, 1024)),
    step=st.sampled_from((4, 8, 16)),
    data=st.data(),
)
def test_interior_chunks_lie_within_the_row(
    columns: int, gap: int, rows: int, width: int, step: int, data: st.DataObject
) -> None:
    """The elements that are loaded one by one are all in one chunk."""
    lines, stride = Lines(), columns + gap
    Peeling(stride, step).write_row_bounds(lines, columns, "rows")
    at: dict[str, Any] = {"pid": data.draw(st.integers(0, rows - 1)), "rows": rows}
    exec(str(lines).replace("tl.minimum", "min"), at)
    begin, end, whole = at["ahead"], at["ahead"] + columns, at["whole"]
    chunks, rest = -(-(columns + step - 1) // width), max(1, columns // width)
    assert end <= chunks * width
    assert rest == 1 or (at["lowest"] <= width and rest * width <= at["highest"])
    assert begin < step and at["base"] >= 0 and at["base"] % step == 0
    assert at["base"] + whole <= (rows - 1) * stride + columns
    assert whole % step == 0 and end - whole < step
    assert whole >= end or (whole // width == (end - 1) // width < chunks)


# -- cubins ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("is_oldest", [False, True])
def test_unaligned_rows_are_accessed_16_bytes_at_a_time(is_oldest: bool, tmp_path: Path) -> None:
    """Two programs fit on an SM, and narrower accesses are behind branches."""
    graph = cross_entropy((64, 50257), "float16")
    program = emit_program(
        graph, KernelPlan("shared", 1, (2048,), 8, async_copies=True, peeled=True)
    )
    if is_oldest:
        ((cubin, shared),) = oldest_triton.compile_program(program, tmp_path)
    else:
        source = compile_program(program, tmp_path)
        cubin, shared = source.cubin, shared_bytes(source)
    assert blocks_per_sm(8, 64, shared) == 2
    assert validate(cubin).safe
    codes = Counter(i.opcode for i in SassProgram.from_cubin(cubin).kernel().instructions)
    assert codes["LDGSTS.E.BYPASS.128"] and codes["LDS.128"] >= 2 * 3
    assert codes["STG.E.128"] == 3  # interior chunks with and without the label, and the ends
    assert {c for c in codes if c.startswith("LDGSTS")} == {"LDGSTS.E.BYPASS.128"}
    # Elements behind the last 16 bytes, for the last row only, and the target.
    assert codes["LDG.E.U16"] == 8 and codes["LDG.E.64"] == 1
    assert not any(code.startswith(("LDL", "STL")) for code in codes)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [False, True])
def test_all_operator_kinds_compile_for_unaligned_rows(ahead: bool, tmp_path: Path) -> None:
    plan = KernelPlan("shared", 1, (512,), 4, async_copies=ahead, peeled=True)
    program = emit_program(all_operators_graph(3001), plan)
    kept = rematerialization_options(
        schedule_operators(program.graph, program.graph.operators), ahead, is_peeled=True
    )[0]
    assert kept.arena(512).total_bytes <= shared_bytes(compile_program(program, tmp_path))
    assert kept.arena(512).total_bytes <= oldest_triton.shared_bytes(program, tmp_path)


@pytest.mark.parametrize("columns", [3072, 3001])
def test_int8_beside_int64_is_not_copied_asynchronously(columns: int, tmp_path: Path) -> None:
    """A thread has two neighbouring elements of each, and the hardware copies at least 4 bytes."""
    build = Builder()
    x, y = (build.input((8, columns), dtype) for dtype in ("int8", "int64"))
    value = build("add", build("cast", x, dtype="int64"), y)
    largest = build("amax", value, dims=(1,), keepdim=True)
    graph = build.graph(build("add", build("sub", value, largest), build("cast", x, dtype="int64")))
    is_peeled = columns % 16 != 0
    (kept, *_) = rematerialization_options(
        schedule_operators(graph, graph.operators), True, is_peeled
    )
    assert {(buffer.element_bytes, buffer.is_prefetched) for buffer in kept.buffers} >= {(1, False)}
    compile_program(
        emit_program(graph, KernelPlan("shared", 1, (512,), 4, 1, 0, True, is_peeled)), tmp_path
    )
