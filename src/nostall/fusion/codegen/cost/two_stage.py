"""Modelled cost of two-stage reductions over rows: the scheme ``column``."""

from __future__ import annotations

from nostall.fusion.codegen.cost.coefficients import COEFFICIENTS, CostCoefficients
from nostall.fusion.codegen.cost.gpu import KernelCost
from nostall.fusion.codegen.cost.memory_traffic import (
    PARTIAL_RESULT_BYTES,
    tensor_bytes,
    with_sector_waste,
)
from nostall.fusion.codegen.cost.multi_pass import (
    COMBINE_INSTRUCTIONS,
    async_copy_instructions,
    tile_copy_bytes,
)
from nostall.fusion.codegen.cost.tile import TileWork, tile_cost
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import pipelined_load_waits
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE, finish_tile


def two_stage_costs(
    kernel: PlannedKernel, coefficients: CostCoefficients
) -> tuple[KernelCost, KernelCost]:
    """The costs of the first kernel, which loops over rows, and of the second one."""
    return _first_stage_cost(kernel, coefficients), _second_stage_cost(kernel)


def _first_stage_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """Each program loops over a group of rows."""
    schedule, plan = kernel.schedule, kernel.plan
    reduced_rows = schedule.count(schedule.reduced_rows)
    iterations = -(-reduced_rows // (plan.rows * plan.splits))
    programs = schedule.row_count // reduced_rows * plan.splits
    outputs = [index for index in schedule.body if index in schedule.mapping.outputs]
    operators = (*schedule.body, *schedule.row_reductions)
    work = TileWork(operators, outputs, len(schedule.row_reductions), "rows")
    tile = tile_cost(kernel, plan.chunks, work, coefficients)
    moved = tensor_bytes(schedule, schedule.mapping.inputs, outputs)
    moved += PARTIAL_RESULT_BYTES * plan.splits * _result_count(schedule)
    copying = async_copy_instructions(kernel, tile, coefficients)
    cost = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=coefficients.program + iterations * (tile.instructions + copying),
        registers=tile.registers,
        memory_bytes=moved / programs,
        iterations=iterations,
        dependent_loads=1 if plan.async_copies else iterations,
        overlapped_loads=pipelined_load_waits(iterations) if plan.async_copies else 0.0,
        # The loads of the next iteration do not wait for the reductions of this one.
        reduction_phases=max(schedule.reduction_level.values(), default=0),
        barriers=iterations * (tile.barriers + plan.async_copies),
        shared_bytes=tile.conversion_bytes + tile_copy_bytes(kernel),
    )
    return with_sector_waste(kernel, cost)


def _second_stage_cost(kernel: PlannedKernel) -> KernelCost:
    """Partial results are reduced."""
    results, splits = _result_count(kernel.schedule), kernel.plan.splits
    width, warps = finish_tile(splits, results)
    programs = max(1, -(-results // width))
    elements = width * splits / (WARP_SIZE * warps)
    return KernelCost(
        programs=programs,
        warps=warps,
        instructions=COMBINE_INSTRUCTIONS + 2 * elements,
        registers=COEFFICIENTS.base_registers + elements,
        memory_bytes=PARTIAL_RESULT_BYTES * splits * results / programs,
        reduction_phases=1.0,
        barriers=2,
    )


def _result_count(schedule: Schedule) -> int:
    """Elements of all reductions over rows."""
    return sum(schedule.mapping.graph[index].elements for index in schedule.row_reductions)
