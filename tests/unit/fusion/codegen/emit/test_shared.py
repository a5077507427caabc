"""Tests of Gluon kernels that keep rows in shared memory: source text and compiled code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from benchmarks.fusion.chains.mechanisms.reuse_rules import Reuse

from nostall.fusion import Builder
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.on_chip import MAX_SHARED_BYTES, rematerialization_options
from nostall.sass import validate
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.graphs.wide_rows import softmax_norm
from tests.unit.fusion.codegen.on_chip import (
    all_operators_graph,
    compile_program,
    emit_program,
    shared_bytes,
)

pytest.importorskip("triton")
pytest.importorskip("torch")

ROW = 8192


# -- text ------------------------------------------------------------------------------------------


def test_the_source_of_a_small_graph() -> None:
    build = Builder()
    x = build.input((32, 5000), "float16")
    largest = build("amax", x, dims=(1,), keepdim=True)
    graph = build.graph(build("cast", build("sub", x, largest), dtype="float16"))
    source = emit_program(graph, KernelPlan("shared", 1, (2048,), 4)).source
    assert (
        source[source.index("@gluon.jit(do") :].split("\n", 2)[2]
        == """\
    _follow()
    pid = gl.program_id(0)
    row: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, 4], [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    lanes = gl.arange(0, 2048, layout=gl.SliceLayout(0, row))[None, :]
    arena = gl.allocate_shared_memory(gl.uint8, [6, 1, 2048], flat)
    as_float16 = seen_as(arena, gl.float16, [3, 1, 2048], flat)
    r = pid + gl.zeros((1, 1), gl.int32, row)
    # pass 0
    a1 = gl.full((1, 2048), float("-inf"), gl.float16, row)
    for at in range(0, 2):
        c = at * 2048 + lanes
        # %1 = amax(%0, dims=(1,), keepdim=True) float16 32x1
        x0 = gl.load(p0 + r * 5000 + c).to(gl.float32)
        a1 = _max(a1, x0.to(gl.float16))
        as_float16.index(at).store(x0.to(gl.float16))
    for at in range(2, 3):
        c = at * 2048 + lanes
        inside = c < 5000
        # %1 = amax(%0, dims=(1,), keepdim=True) float16 32x1
        x0 = gl.load(p0 + r * 5000 + c, mask=inside).to(gl.float32)
        a1 = _max(a1, gl.where(inside, x0.to(gl.float16), float("-inf")))
        as_float16.index(at).store(x0.to(gl.float16))
    v1 = gl.reduce(a1, 1, _max, keep_dims=True).to(gl.float32)
    # pass 1
    barrier()
    for at in range(0, 2):
        c = at * 2048 + lanes
        x0 = as_float16.index(at).load(row).to(gl.float32)
        # %2 = sub(%0, %1) float16 32x5000
        v2 = libdevice.sub_rn(x0, v1)
        # %3 = cast(%2) float16 32x5000
        v3 = v2.to(gl.float16).to(gl.float32)
        gl.store(p3 + r * 5000 + c, v3.to(gl.float16))
    for at in range(2, 3):
        c = at * 2048 + lanes
        inside = c < 5000
        x0 = as_float16.index(at).load(row).to(gl.float32)
        # %2 = sub(%0, %1) float16 32x5000
        v2 = libdevice.sub_rn(x0, v1)
        # %3 = cast(%2) float16 32x5000
        v3 = v2.to(gl.float16).to(gl.float32)
        gl.store(p3 + r * 5000 + c, v3.to(gl.float16), mask=inside)
"""
    )


def test_async_copies_complete_before_they_are_read() -> None:
    build = Builder()
    x = build.input((32, 5000), "float16")
    largest = build("amax", x, dims=(1,), keepdim=True)
    graph = build.graph(build("cast", build("sub", x, largest), dtype="float16"))
    program = emit_program(graph, KernelPlan("shared", 1, (2048,), 4, async_copies=True))
    source = program.source
    assert (
        source[source.index("    # pass 0\n") : source.index("    # pass 1")]
        == """\
    # pass 0
    for at in range(0, 3):
        c = at * 2048 + lanes
        inside = c < 5000
        copy_ahead(as_float16.index(at), p0 + r * 5000 + c, mask=inside)
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    a1 = gl.full((1, 2048), float("-inf"), gl.float16, row)
    for at in range(0, 2):
        c = at * 2048 + lanes
        x0 = as_float16.index(at).load(row).to(gl.float32)
        # %1 = amax(%0, dims=(1,), keepdim=True) float16 32x1
        a1 = _max(a1, x0.to(gl.float16))
    for at in range(2, 3):
        c = at * 2048 + lanes
        inside = c < 5000
        x0 = as_float16.index(at).load(row).to(gl.float32)
        # %1 = amax(%0, dims=(1,), keepdim=True) float16 32x1
        a1 = _max(a1, gl.where(inside, x0.to(gl.float16), float("-inf")))
    v1 = gl.reduce(a1, 1, _max, keep_dims=True).to(gl.float32)
"""
    )
    assert program.launches[0].aligned


def test_rows_shorter_than_a_chunk_are_always_masked() -> None:
    build = Builder()
    x = build.input((32, 1000), "float16")
    largest = build("amax", x, dims=(1,), keepdim=True)
    graph = build.graph(build("sub", x, largest))
    source = emit_program(graph, KernelPlan("shared", 1, (1024,), 4)).source
    accesses = [line for line in source.splitlines() if "gl.load(p" in line or "gl.store(" in line]
    assert len(accesses) == 2
    assert all("mask=inside" in line for line in accesses)


def test_unaligned_tensors_are_copied_to_aligned_memory() -> None:
    import torch

    from nostall.fusion.codegen.runtime.kernel import align_tensor

    aligned = torch.arange(66, dtype=torch.float16)
    unaligned = aligned[1:].as_strided((4, 8), (16, 2))
    copied = align_tensor(unaligned)
    assert unaligned.data_ptr() % 16 and not copied.data_ptr() % 16
    assert copied.stride() == unaligned.stride()
    assert torch.equal(copied, unaligned)
    assert align_tensor(aligned) is aligned


def test_equal_patterns_and_plans_give_equal_bytes() -> None:
    plan = KernelPlan("shared", 1, (1024,), 4)
    sources = [emit_program(softmax_norm((rows, ROW), "float16"), plan).source for rows in (64, 64)]
    assert sources[0] == sources[1]


def test_the_source_does_not_depend_on_the_number_of_rows() -> None:
    def source(rows: int, copies: bool) -> str:
        build = Builder(rows)
        x = build.input((rows, 5000), "float16")
        total = build("sum", x, dims=(1,), keepdim=True)
        graph = build.graph(build("div", x, total))
        return emit_program(graph, KernelPlan("shared", 1, (2048,), 4, async_copies=copies)).source

    for copies in (False, True):
        assert source(13, copies) == source(17, copies)


def _random(build: Builder, shape: tuple[int, ...]) -> int:
    return build("random", build.input((1,), "int64"), shape=shape, words=4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b, x: b("add", x, _random(b, (8, 3000))), "random"),
        (lambda b, x: b("expand", b.input((8, 1)), shape=(8, 3000)), "no broadcast"),
    ],
)
def test_operators_without_a_gluon_form_are_illegal(change: object, reason: str) -> None:
    build = Builder()
    x = build.input((8, 3000))
    value = change(build, x)  # type: ignore[operator]
    total = build("sum", value, dims=(1,), keepdim=True)
    least = build("amin", x, dims=(1,), keepdim=True)
    graph = build.graph(build("add", build("sub", x, total), least), value)
    schedule = schedule_operators(graph, graph.operators)
    assert reason in str(illegal_reason(schedule, KernelPlan("shared", 1, (1024,), 4)))


# -- cubins ----------------------------------------------------------------------------------------


def test_reuse_reduces_the_shared_memory_of_the_cubin(tmp_path: Path) -> None:
    """Four buffers; only neighbouring ones have overlapping live ranges."""
    graph = softmax_norm((64, ROW), "float32")
    plan = KernelPlan("shared", 1, (1024,), 8)
    programs = {reuse: emit_program(graph, plan, reuse) for reuse in get_args(Reuse)}
    assert programs["dominance"].source == programs["order"].source
    without_reuse, with_reuse = (
        compile_program(programs[reuse], tmp_path) for reuse in ("none", "order")
    )
    row = 4 * ROW
    scratch = 64  # bytes that reductions across 8 warps use at most
    assert 4 * row <= shared_bytes(without_reuse) <= 4 * row + scratch
    assert row <= shared_bytes(with_reuse) <= row + scratch
    verdict = validate(with_reuse.cubin)
    assert verdict.safe, verdict.findings[:3]


def test_async_copies_are_cp_async_of_16_bytes(tmp_path: Path) -> None:
    """No loads to registers remain."""
    build = Builder()
    x = build.input((32, 16384), "float16")
    largest = build("amax", x, dims=(1,), keepdim=True)
    graph = build.graph(build("cast", build("sub", x, largest), dtype="float16"))
    source = compile_program(
        emit_program(graph, KernelPlan("shared", 1, (4096,), 8, async_copies=True)), tmp_path
    )
    assert source.ptx is not None
    assert len(re.findall(r"cp\.async\.cg\.shared\.global .*0x10", source.ptx)) >= 2
    assert "ld.global" not in source.ptx
    assert validate(source.cubin).safe


def test_barriers_separate_passes(tmp_path: Path) -> None:
    """In the PTX, between the last access of a pass and the first access of the next."""
    graph = softmax_norm((64, ROW), "float32")
    source = compile_program(
        emit_program(graph, KernelPlan("shared", 1, (2048,), 8), "none"), tmp_path
    )
    assert source.ptx is not None
    accesses = re.findall(r"bar\.sync|(?:st|ld)\.shared\.v4\.b32", source.ptx)
    runs = "".join({"b": "|", "s": "s", "l": "l"}[text[0]] for text in accesses)
    # Each pass reads what the previous pass wrote, so a barrier precedes each read after a write.
    assert runs.count("s") and runs.count("l")
    assert "sl" not in runs


def test_all_operator_kinds_compile(tmp_path: Path) -> None:
    program = emit_program(all_operators_graph(), KernelPlan("shared", 1, (512,), 4))
    arena_bytes = rematerialization_options(
        schedule_operators(program.graph, program.graph.operators)
    )[0].arena(512)
    assert {buffer.element_bytes for buffer in arena_bytes.buffers} == {1, 2, 4}
    assert (
        arena_bytes.total_bytes
        <= shared_bytes(compile_program(program, tmp_path))
        <= arena_bytes.total_bytes + 1024
    )


def test_the_oldest_triton_uses_as_much_shared_memory(tmp_path: Path) -> None:
    program = emit_program(all_operators_graph(), KernelPlan("shared", 1, (512,), 4))
    arena_bytes = (
        rematerialization_options(schedule_operators(program.graph, program.graph.operators))[0]
        .arena(512)
        .total_bytes
    )
    assert arena_bytes <= oldest_triton.shared_bytes(program, tmp_path) <= arena_bytes + 1024


def test_the_widest_legal_row_compiles(tmp_path: Path) -> None:
    build = Builder()
    columns = MAX_SHARED_BYTES // 4 // 1024 * 1024
    x = build.input((4, columns))
    total = build("sum", x, dims=(1,), keepdim=True)
    graph = build.graph(
        build("div", x, total), build("add", x, build("amax", x, dims=(1,), keepdim=True))
    )
    source = compile_program(emit_program(graph, KernelPlan("shared", 1, (1024,), 4)), tmp_path)
    assert shared_bytes(source) <= 227 * 1024
