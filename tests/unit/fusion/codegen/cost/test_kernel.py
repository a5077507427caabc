"""The schedule model: how tiles lie, what kernels take, how long programs take together."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.cost_model.compile import cubin_resources

from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.cost.gpu import H200, KernelCost, kernel_seconds, resident_programs
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.cost.thread_layout import ThreadLayout, thread_layout
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.tuning.source import compile_triton


def of(name: str) -> Schedule:
    graph = chain_graph(CHAINS[name])
    return schedule_operators(graph, graph.operators)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "found"),
    [
        # (rows, columns, warps, widest): layouts that Triton 3.6 to 3.9 gave these tiles.
        ((1, 2048, 8, 8), ThreadLayout(8, 1, 8, 32, 8)),
        ((1, 1024, 8, 8), ThreadLayout(4, 1, 4, 32, 8)),
        ((1, 1024, 2, 16), ThreadLayout(16, 1, 16, 32, 2)),
        ((2, 4096, 16, 16), ThreadLayout(16, 1, 16, 32, 8)),
        ((2, 4096, 16, 8), ThreadLayout(16, 2, 8, 32, 16)),
        ((1, 512, 4, 8), ThreadLayout(4, 1, 4, 32, 4)),
    ],
)
def test_tiles_lie_as_triton_lays_them(
    tile: tuple[int, int, int, int], found: ThreadLayout
) -> None:
    assert thread_layout(*tile) == found


def test_every_element_has_a_thread() -> None:
    for rows in (1, 4, 64):
        for columns in (32, 256, 4096):
            for warps in (1, 4, 32):
                for along_rows in (False, True):
                    lies = thread_layout(rows, columns, warps, 8, along_rows)
                    assert lies.elements_per_thread * 32 * warps >= rows * columns
                    assert 1 <= lies.rows_per_thread <= rows and lies.warps_per_row <= warps


# -- what kernels take -----------------------------------------------------------------------------

COMPILED = (
    ("RMSNorm + int8 16384x4096", KernelPlan("block", 1, (4096,), 8)),
    ("RMSNorm + int8 16384x4096", KernelPlan("block", 2, (4096,), 32)),
    ("norm + gelu + mask 16384x3000", KernelPlan("block", 1, (2048, 1024), 4)),
    ("softmax + mask 32768x1024", KernelPlan("warp", 1, (1024,), 1)),
    ("double norm 16384x2048", KernelPlan("block", 1, (2048,), 8)),
    ("RMSNorm + int8 8192x7168", KernelPlan("block", 1, (1024,) * 7, 8)),
    ("SwiGLU 16384x5504", KernelPlan("thread", 1, (1024,), 4)),
    ("softmax + dropout 16384x2048", KernelPlan("block", 1, (2048,), 8)),
)


@pytest.mark.parametrize(("name", "plan"), COMPILED)
def test_instructions_and_registers_are_near_those_of_the_binary(
    name: str, plan: KernelPlan, tmp_path: Path
) -> None:
    program = emit(plan_kernel(of(name), plan))
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    ((kernel, launch),) = launch_specs(program).items()
    found = cubin_resources(compile_triton(path, kernel, launch, "sm_90").cubin)
    (demand,) = kernel_costs(PlannedKernel(of(name), plan))
    assert demand.instructions == pytest.approx(found["instructions"], rel=0.4)
    assert demand.registers == pytest.approx(found["registers"], rel=0.4, abs=8)


def test_bytes_move_once_and_again_where_rows_are_walked_over() -> None:
    kernel = of("softmax + mask 16384x3000")
    moved = sum(kernel.mapping.graph[i].bytes for i in (0, 1, *kernel.mapping.outputs))
    (held,) = kernel_costs(PlannedKernel(kernel, KernelPlan("block", 1, (2048, 1024), 4)))
    assert held.programs * held.memory_bytes == pytest.approx(moved)
    assert held.reread_bytes == 0
    (looped,) = kernel_costs(PlannedKernel(kernel, KernelPlan("looped", 1, (1024,), 4)))
    assert looped.programs * looped.memory_bytes == pytest.approx(moved)
    # Scores and mask are read for the maximum with its sum, and for the result.
    read = sum(kernel.mapping.graph[i].bytes for i in (0, 1))
    assert looped.programs * looped.reread_bytes == pytest.approx(read)
    every = kernel_costs(PlannedKernel(kernel, KernelPlan("split", 1, (256,), 1, 4)))
    assert len(every) == 2
    assert sum(one.programs * one.memory_bytes for one in every) > moved + read


@pytest.mark.parametrize(
    ("name", "warps", "registers", "shared"),
    [
        # Of the binaries that Triton 3.6 made (benchmarks/fusion/results/cost_model.json.gz).
        ("short attention 64x12x48x64", 2, 128, 16384),
        ("short attention 64x12x48x64", 4, 74, 16384),
        ("short attention 64x12x48x64", 8, 58, 16384),
        ("short attention backward 64x12x48x64", 4, 94, 16384),
    ],
)
def test_small_dots_take_what_their_binaries_do(
    name: str, warps: int, registers: int, shared: int
) -> None:
    kernel = of(name)
    (plan,) = (plan for plan in plans(kernel).legal_plans if plan.num_warps == warps)
    (demand,) = kernel_costs(PlannedKernel(kernel, plan))
    assert demand.programs == 64 * 12 and demand.shared_bytes == shared
    assert demand.registers == pytest.approx(registers, rel=0.35)
    moved = sum(
        kernel.mapping.graph[i].bytes for i in (*kernel.mapping.inputs, *kernel.mapping.outputs)
    )
    assert demand.programs * demand.memory_bytes == pytest.approx(moved)


def test_two_chunks_in_two_layouts_go_through_shared_memory() -> None:
    kernel = of("norm + gelu + mask 16384x3000")
    (alike,) = kernel_costs(PlannedKernel(kernel, KernelPlan("block", 1, (2048, 1024), 4)))
    (apart,) = kernel_costs(PlannedKernel(kernel, KernelPlan("block", 1, (2048, 1024), 8)))
    assert alike.shared_bytes == 0 < apart.shared_bytes


# -- how long it takes -----------------------------------------------------------------------------

ONE = KernelCost(programs=132, warps=8, instructions=400, registers=40, memory_bytes=1e4)


def test_what_limits_the_programs_of_an_sm() -> None:
    many = replace(ONE, programs=100_000)
    assert resident_programs(ONE) == 1
    assert resident_programs(replace(many, registers=8)) == 8  # 64 warps
    assert resident_programs(replace(many, registers=128)) == 2
    assert resident_programs(replace(many, warps=1, registers=16)) == 32
    assert resident_programs(replace(many, shared_bytes=100_000)) == 2
    assert resident_programs(replace(many, warps=32, registers=255)) == 1


def test_bytes_that_are_enough_decide_alone() -> None:
    copy = KernelCost(programs=10**6, warps=8, instructions=50, registers=32, memory_bytes=65536)
    wanted = 10**6 * 65536 / H200.copy_bytes_per_s
    assert wanted < kernel_seconds(copy) < 1.1 * wanted


def test_instructions_that_are_enough_decide_alone() -> None:
    busy = KernelCost(programs=10**5, warps=8, instructions=10**5, registers=32, memory_bytes=64)
    wanted = 10**5 / H200.sms * 8 * 10**5 / H200.issue_rate / H200.clock_hz
    assert wanted < kernel_seconds(busy) < 1.1 * wanted


def test_programs_begin_one_after_the_other() -> None:
    """Of 32 elements each, a million programs take longer to begin than to run (measured)."""
    many = KernelCost(programs=10**6, warps=1, instructions=40, registers=16, memory_bytes=128)
    assert kernel_seconds(many) == pytest.approx(10**6 * H200.program_start_s, rel=0.1)


def test_a_program_alone_waits_for_everything_it_does() -> None:
    waiting = replace(ONE, dependent_loads=20, barriers=10)
    least = 20 * H200.load_latency_s + 10 * H200.barrier_s
    assert least < kernel_seconds(waiting) < least + 10e-6
    # Programs beside it hide that.
    many = replace(waiting, programs=132 * 64)
    assert kernel_seconds(many) < 0.2 * 64 * kernel_seconds(waiting)


@pytest.mark.parametrize(
    ("what", "more"),
    [
        ("barriers", 20),
        ("dependent_loads", 8),
        ("instructions", 4000),
        ("registers", 200),
        ("memory_bytes", 1e5),
    ],
)
def test_nothing_that_is_asked_for_makes_it_faster(what: str, more: float) -> None:
    many = replace(ONE, programs=5000)
    assert kernel_seconds(replace(many, **{what: more})) > kernel_seconds(many)


def test_what_does_not_fit_into_registers_costs_instructions() -> None:
    full = replace(ONE, programs=5000, registers=255)
    assert kernel_seconds(replace(full, registers=400)) > kernel_seconds(full)


def test_many_missing_registers_cost_more_than_in_proportion() -> None:
    """A tile of twice what fits leaves nearly nothing in registers: measured ten times as slow."""
    full = replace(ONE, programs=5000, iterations=16, registers=255 / 1.2)
    extra = [
        kernel_seconds(replace(full, registers=r)) - kernel_seconds(full) for r in (255.0, 510.0)
    ]
    assert extra[1] > 4 * extra[0] > 0


def test_warps_begin_one_after_the_other_too() -> None:
    small = KernelCost(programs=10**5, warps=1, instructions=10, registers=16, memory_bytes=32)
    many = replace(small, warps=16)
    wanted = 16 * 10**5 * H200.warp_start_s
    assert wanted > 10**5 * H200.program_start_s
    assert kernel_seconds(many) == pytest.approx(wanted, rel=0.2) and kernel_seconds(
        small
    ) < kernel_seconds(many)


def test_the_first_choice_is_the_best_modelled_one() -> None:
    kernel = of("double norm 16384x2048")
    times = {planned: modelled_seconds(planned) for planned in plans(kernel).legal}
    assert times[default_plan(kernel)] == min(times.values())
    assert json.dumps(sorted(times.values()))  # numbers, not numpy's
