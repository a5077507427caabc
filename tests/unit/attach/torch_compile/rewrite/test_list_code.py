"""Code of kernels over lists for sm_90: full blocks move four elements in each instruction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.core.launch import Buffer, LaunchSpec
from nostall.fusion.graph.builder import Builder
from nostall.fusion.hardware import H200
from nostall.fusion.lists.kernel import DEFAULT_PLAN, Layout, ListKernel, plan_for
from nostall.fusion.lists.norms import norm_kernel
from nostall.fusion.lists.pointwise import Pointwise, Read, Write, pointwise_kernel
from nostall.fusion.lists.slots import Slot
from nostall.tuning.sources.triton_source import compile_triton
from tests.unit.fusion.codegen.sm90_code import cubin_opcodes

SIZES = [5, 4096, 10_001, 65_536]
SLOTS = tuple(Slot((size,), (1,)) for size in SIZES)


def momentum() -> ListKernel:
    """x + scale * y for lists x and y, written to x."""
    build = Builder()
    x, y, scale = build.input((8,)), build.input((8,)), build.input(())
    graph = build.graph(build("add", x, build("mul", y, scale)))
    count = len(SLOTS)
    first, second = tuple(range(count)), tuple(range(count, 2 * count))
    reads = (Read(first, "float32", True), Read(second, "float32", True))
    layouts = tuple(Layout(slot.shape, slot.strides, "float32") for slot in SLOTS)
    return pointwise_kernel(
        Pointwise(
            graph,
            SLOTS,
            (*reads, Read((2 * count,), "float32", False)),
            (Write(graph.outputs[0], first, "float32"),),
            (*layouts, *layouts, Layout((), (), "float32")),
            count,
            (),
        ),
        DEFAULT_PLAN,
    )


def opcodes(kernel: ListKernel, number: int, folder: Path) -> list[str]:
    launch = kernel.launches[number]
    path = folder / f"{launch.name}.py"
    path.write_text(kernel.source)
    buffers = [
        Buffer(name=name, dtype="f32", shape=(65_536,), role="scratch") for name in launch.arguments
    ]
    spec = LaunchSpec(grid=(*launch.grid, 1), args=buffers, num_warps=launch.num_warps)
    return cubin_opcodes(compile_triton(path, launch.name, spec, "sm_90").cubin)


@pytest.mark.slow
def test_full_blocks_are_moved_four_elements_at_a_time(tmp_path: Path) -> None:
    code = opcodes(momentum(), 0, tmp_path)
    moves = DEFAULT_PLAN.block // (4 * 32 * DEFAULT_PLAN.num_warps)  # of a thread and a list
    assert sum(each.startswith("LDG") and ".128" in each for each in code) >= 2 * moves
    assert sum(each.startswith("STG") and ".128" in each for each in code) >= moves
    norms = norm_kernel(SLOTS, 2.0, "float32", "float32", DEFAULT_PLAN)
    assert len(norms.launches) == 2
    assert any(each.startswith("LDG") and ".128" in each for each in opcodes(norms, 0, tmp_path))


def test_the_sources_depend_on_layouts_only_and_short_lists_take_one_launch() -> None:
    first, second = momentum(), momentum()
    assert first.source == second.source
    (launch,) = first.launches
    blocks = sum(-(-size // DEFAULT_PLAN.block) for size in SIZES)
    assert launch.grid == (blocks, 1)
    assert first.mutated == len(SLOTS)


def test_norms_have_as_many_programs_as_the_gpu_needs() -> None:
    assert plan_for(H200) == DEFAULT_PLAN
    slots = (Slot((1 << 26,), (1,)),)
    grids = [
        norm_kernel(slots, 2.0, "float32", "float32", plan_for(replace(H200, sms=sms)))
        .launches[0]
        .grid
        for sms in (132, 33)
    ]
    assert grids == [(4096, 1), (1024, 1)]
