"""Occupancy compared with cases computed by hand."""

from __future__ import annotations

import pytest
from tests.unit.sass.model.model_kernels import function, ins, program

from nostall.core.errors import BadLaunch, UnsupportedArchitecture
from nostall.core.launch import LaunchSpec
from nostall.sass.binary.cubin import ARCHITECTURES
from nostall.sass.model.occupancy import Resources, block_limits, kernel_resources, occupancy
from nostall.sass.model.parameters import PARAMETERS, SUB_CORES, sm_parameters

MANY = LaunchSpec(grid=(100_000, 1, 1))


@pytest.mark.parametrize(
    ("sm", "registers", "shared", "threads", "blocks", "limit"),
    [
        # 128 registers: 4096 a warp, 4 warps a sub-core, 16 an SM; 4 warps a block.
        (80, 128, 1024, 128, 4, "registers"),
        # 255 registers round up to 256: 2 warps a sub-core.
        (80, 255, 1024, 256, 1, "registers"),
        # 65 registers: 2080 round up to 2304 a warp, 7 a sub-core, 28 an SM.
        (80, 65, 1024, 256, 3, "registers"),
        # 164 KB / (48 + 1) KB.
        (80, 32, 49 * 1024, 128, 3, "shared memory"),
        (90, 32, 49 * 1024, 128, 4, "shared memory"),
        # 48 warps against 8 a block.
        (86, 32, 1024, 256, 6, "warps"),
        (90, 32, 1024, 256, 8, "warps"),
        (75, 32, 0, 32, 16, "blocks"),
        (80, 16, 1024, 32, 32, "blocks"),
    ],
)
def test_blocks_per_sm(sm, registers, shared, threads, blocks, limit):
    launch = MANY.model_copy(update={"block": (threads, 1, 1)})
    result = occupancy(Resources(registers, shared, 1, threads), launch, PARAMETERS[sm])
    assert (result.blocks_per_sm, result.limit) == (blocks, limit)
    assert result.warps_per_scheduler == -(-blocks * -(-threads // 32) // SUB_CORES)


def test_barriers_limit_the_blocks():
    resources = Resources(16, 1024, 16, 64)
    assert block_limits(resources, PARAMETERS[80])["barriers"] == 4
    assert occupancy(resources, MANY, PARAMETERS[80]).limit == "barriers"


def test_a_small_grid_leaves_the_sm_partly_empty():
    resources = Resources(32, 1024, 1, 128)
    result = occupancy(resources, LaunchSpec(grid=(64, 1, 1)), PARAMETERS[80])
    assert (result.limit, result.resident_blocks, result.warps_per_scheduler) == ("grid", 1, 1)
    assert (result.rounds, result.active_sms) == (1.0, 64)


def test_more_blocks_than_fit_run_in_rounds():
    resources = Resources(128, 1024, 1, 128)
    result = occupancy(resources, LaunchSpec(grid=(108 * 10, 1, 1)), PARAMETERS[80])
    assert (result.resident_blocks, result.rounds, result.active_sms) == (4, 2.5, 108)


def test_a_block_smaller_than_an_sm_leaves_sub_cores_idle():
    resources = Resources(32, 0, 0, 64)
    result = occupancy(resources, LaunchSpec(block=(64, 1, 1)), PARAMETERS[80])
    assert (result.active_sub_cores, result.warps_per_scheduler) == (2, 1)


def test_a_block_that_does_not_fit_is_rejected():
    with pytest.raises(BadLaunch, match=r"too much of shared memory.*smaller"):
        occupancy(Resources(32, 300_000, 1, 128), MANY, PARAMETERS[90])


def test_resources_of_a_kernel_without_records():
    kernel = function([ins("FFMA R40, R1, R2, R99"), ins("BAR.SYNC 0x2"), ins("EXIT")])
    launch = LaunchSpec(block=(96, 1, 1), shared=2048)
    result = kernel_resources(program(kernel), kernel, launch, PARAMETERS[80])
    assert result == Resources(registers=100, shared=3072, barriers=3, threads=96)
    assert result.warps == 3


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_the_parameters_of_each_architecture_are_plausible(sm):
    parameters = sm_parameters(sm)
    assert parameters.sm == sm
    assert (
        parameters.latency_shared
        < parameters.latency_l2
        < parameters.latency_global
        < parameters.latency_dram
    )
    assert 0 < parameters.global_bytes_per_cycle(parameters.sms) < parameters.l2_bytes_per_cycle
    assert parameters.global_bytes_per_cycle(1) > parameters.global_bytes_per_cycle(parameters.sms)


def test_an_unknown_architecture_is_named():
    with pytest.raises(UnsupportedArchitecture, match=r"sm_70.*it has those of sm_75"):
        sm_parameters(70)
