"""Tests of the cost model: thread layouts, modelled costs of kernels, modelled time on a GPU."""

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
from nostall.fusion.codegen.cost.tile import ThreadLayout, thread_layout
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.tuning.sources.triton_source import compile_triton


def chain_schedule(name: str) -> Schedule:
    graph = chain_graph(CHAINS[name])
    return schedule_operators(graph, graph.operators)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tile", "expected"),
    [
        # (rows, columns, warps, widest vector), and the layout in Triton 3.6 to 3.9.
        ((1, 2048, 8, 8), ThreadLayout(8, 1, 8, 32, 8)),
        ((1, 1024, 8, 8), ThreadLayout(4, 1, 4, 32, 8)),
        ((1, 1024, 2, 16), ThreadLayout(16, 1, 16, 32, 2)),
        ((2, 4096, 16, 16), ThreadLayout(16, 1, 16, 32, 8)),
        ((2, 4096, 16, 8), ThreadLayout(16, 2, 8, 32, 16)),
        ((1, 512, 4, 8), ThreadLayout(4, 1, 4, 32, 4)),
    ],
)
def test_thread_layouts_are_those_of_triton(
    tile: tuple[int, int, int, int], expected: ThreadLayout
) -> None:
    assert thread_layout(*tile) == expected


def test_thread_layouts_cover_all_elements() -> None:
    for rows in (1, 4, 64):
        for columns in (32, 256, 4096):
            for warps in (1, 4, 32):
                for along_rows in (False, True):
                    layout = thread_layout(rows, columns, warps, 8, along_rows)
                    assert layout.elements_per_thread * 32 * warps >= rows * columns
                    assert 1 <= layout.rows_per_thread <= rows and layout.warps_per_row <= warps


# -- costs of kernels ------------------------------------------------------------------------------

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
def test_modelled_instructions_and_registers_are_near_the_binary(
    name: str, plan: KernelPlan, tmp_path: Path
) -> None:
    program = emit(plan_kernel(chain_schedule(name), plan))
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    ((kernel, launch),) = launch_specs(program).items()
    compiled = cubin_resources(compile_triton(path, kernel, launch, "sm_90").cubin)
    (cost,) = kernel_costs(PlannedKernel(chain_schedule(name), plan))
    assert cost.instructions == pytest.approx(compiled["instructions"], rel=0.4)
    assert cost.registers == pytest.approx(compiled["registers"], rel=0.4, abs=8)


def test_looped_kernels_read_rows_once_more_for_each_pass() -> None:
    schedule = chain_schedule("softmax + mask 16384x3000")
    moved = sum(schedule.mapping.graph[i].bytes for i in (0, 1, *schedule.mapping.outputs))
    (in_registers,) = kernel_costs(PlannedKernel(schedule, KernelPlan("block", 1, (2048, 1024), 4)))
    assert in_registers.programs * in_registers.memory_bytes == pytest.approx(moved)
    assert in_registers.reread_bytes == 0
    (looped,) = kernel_costs(PlannedKernel(schedule, KernelPlan("looped", 1, (1024,), 4)))
    assert looped.programs * looped.memory_bytes == pytest.approx(moved)
    # One pass reads scores and mask for the maximum and the sum, the next pass for the result.
    read = sum(schedule.mapping.graph[i].bytes for i in (0, 1))
    assert looped.programs * looped.reread_bytes == pytest.approx(read)
    split = kernel_costs(PlannedKernel(schedule, KernelPlan("split", 1, (256,), 1, 4)))
    assert len(split) == 2
    assert sum(each.programs * each.memory_bytes for each in split) > moved + read


@pytest.mark.parametrize(
    ("name", "warps", "registers", "shared"),
    [
        # From binaries of Triton 3.6 (benchmarks/fusion/results/cost_model.json.gz).
        ("short attention 64x12x48x64", 2, 128, 16384),
        ("short attention 64x12x48x64", 4, 74, 16384),
        ("short attention 64x12x48x64", 8, 58, 16384),
        ("short attention backward 64x12x48x64", 4, 94, 16384),
    ],
)
def test_modelled_cost_of_small_dots_is_near_the_binary(
    name: str, warps: int, registers: int, shared: int
) -> None:
    schedule = chain_schedule(name)
    (plan,) = (plan for plan in plans(schedule).legal_plans if plan.num_warps == warps)
    (cost,) = kernel_costs(PlannedKernel(schedule, plan))
    assert cost.programs == 64 * 12 and cost.shared_bytes == shared
    assert cost.registers == pytest.approx(registers, rel=0.35)
    moved = sum(
        schedule.mapping.graph[i].bytes
        for i in (*schedule.mapping.inputs, *schedule.mapping.outputs)
    )
    assert cost.programs * cost.memory_bytes == pytest.approx(moved)


def test_chunks_with_different_layouts_use_shared_memory() -> None:
    schedule = chain_schedule("norm + gelu + mask 16384x3000")
    (equal_layouts,) = kernel_costs(
        PlannedKernel(schedule, KernelPlan("block", 1, (2048, 1024), 4))
    )
    (different_layouts,) = kernel_costs(
        PlannedKernel(schedule, KernelPlan("block", 1, (2048, 1024), 8))
    )
    assert equal_layouts.shared_bytes == 0 < different_layouts.shared_bytes


# -- time ------------------------------------------------------------------------------------------

COST = KernelCost(programs=132, warps=8, instructions=400, registers=40, memory_bytes=1e4)


def test_limits_of_resident_programs() -> None:
    many = replace(COST, programs=100_000)
    assert resident_programs(COST) == 1
    assert resident_programs(replace(many, registers=8)) == 8  # 64 warps
    assert resident_programs(replace(many, registers=128)) == 2
    assert resident_programs(replace(many, warps=1, registers=16)) == 32
    assert resident_programs(replace(many, shared_bytes=100_000)) == 2
    assert resident_programs(replace(many, warps=32, registers=255)) == 1


def test_memory_bound_kernels_take_the_copy_time() -> None:
    copy = KernelCost(programs=10**6, warps=8, instructions=50, registers=32, memory_bytes=65536)
    wanted = 10**6 * 65536 / H200.copy_bytes_per_s
    assert wanted < kernel_seconds(copy) < 1.1 * wanted


def test_compute_bound_kernels_take_the_issue_time() -> None:
    busy = KernelCost(programs=10**5, warps=8, instructions=10**5, registers=32, memory_bytes=64)
    wanted = 10**5 / H200.sms * 8 * 10**5 / H200.issue_rate / H200.clock_hz
    assert wanted < kernel_seconds(busy) < 1.1 * wanted


def test_small_programs_take_their_start_time() -> None:
    """A million programs of 32 elements take longer to start than to run (measured)."""
    many = KernelCost(programs=10**6, warps=1, instructions=40, registers=16, memory_bytes=128)
    assert kernel_seconds(many) == pytest.approx(10**6 * H200.program_start_s, rel=0.1)


def test_a_single_resident_program_hides_no_latency() -> None:
    waiting = replace(COST, dependent_loads=20, barriers=10)
    least = 20 * H200.load_latency_s + 10 * H200.barrier_s
    assert least < kernel_seconds(waiting) < least + 10e-6
    # Other resident programs hide the latency.
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
def test_higher_cost_takes_longer(what: str, more: float) -> None:
    many = replace(COST, programs=5000)
    assert kernel_seconds(replace(many, **{what: more})) > kernel_seconds(many)


def test_register_spilling_takes_time() -> None:
    full = replace(COST, programs=5000, registers=255)
    assert kernel_seconds(replace(full, registers=400)) > kernel_seconds(full)


def test_time_grows_more_than_linearly_with_spilled_registers() -> None:
    """A tile of twice the registers keeps nearly nothing in them (measured: ten times slower)."""
    full = replace(COST, programs=5000, iterations=16, registers=255 / 1.2)
    extra = [
        kernel_seconds(replace(full, registers=r)) - kernel_seconds(full) for r in (255.0, 510.0)
    ]
    assert extra[1] > 4 * extra[0] > 0


def test_small_warps_take_their_start_time() -> None:
    small = KernelCost(programs=10**5, warps=1, instructions=10, registers=16, memory_bytes=32)
    many = replace(small, warps=16)
    wanted = 16 * 10**5 * H200.warp_start_s
    assert wanted > 10**5 * H200.program_start_s
    assert kernel_seconds(many) == pytest.approx(wanted, rel=0.2) and kernel_seconds(
        small
    ) < kernel_seconds(many)


def test_the_default_plan_is_the_fastest_modelled_plan() -> None:
    schedule = chain_schedule("double norm 16384x2048")
    times = {planned: modelled_seconds(planned) for planned in plans(schedule).legal}
    assert times[default_plan(schedule)] == min(times.values())
    assert json.dumps(sorted(times.values()))  # numbers, not numpy's
