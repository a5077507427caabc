"""Modelled cost of the kernels of a plan, scheme by scheme. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nostall.fusion.codegen.cost.coefficients import COEFFICIENTS, CostCoefficients
from nostall.fusion.codegen.cost.dots import dot_cost
from nostall.fusion.codegen.cost.gpu import KernelCost
from nostall.fusion.codegen.cost.memory_traffic import tensor_bytes, with_sector_waste
from nostall.fusion.codegen.cost.multi_pass import looped_cost, shared_cost, split_costs
from nostall.fusion.codegen.cost.sequence import sequence_cost
from nostall.fusion.codegen.cost.tile import TileWork, tile_cost
from nostall.fusion.codegen.cost.two_stage import two_stage_costs
from nostall.fusion.codegen.tiling.kernel_plan import Scheme
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel

CostFunction = Callable[[PlannedKernel, CostCoefficients], tuple[KernelCost, ...]]


def kernel_costs(
    kernel: PlannedKernel, coefficients: CostCoefficients = COEFFICIENTS
) -> tuple[KernelCost, ...]:
    """The modelled costs of all launches of a kernel, in their order."""
    return COSTS[kernel.plan.scheme](kernel, coefficients)


def _flat_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost without reductions; a program has one chunk of elements."""
    return _register_cost(kernel, coefficients, kernel.plan.chunks[0])


def _row_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost with whole rows in registers."""
    cost = _register_cost(kernel, coefficients, kernel.plan.rows)
    return with_sector_waste(kernel, cost)


def _register_cost(
    kernel: PlannedKernel, coefficients: CostCoefficients, rows_per_program: int
) -> KernelCost:
    schedule, plan = kernel.schedule, kernel.plan
    mapping = schedule.mapping
    programs = -(-schedule.row_count // rows_per_program)
    tile = tile_cost(kernel, plan.chunks, TileWork(schedule.body, mapping.outputs), coefficients)
    return KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=coefficients.program + tile.instructions,
        registers=tile.registers,
        memory_bytes=tensor_bytes(schedule, mapping.inputs, mapping.outputs) / programs,
        reduction_phases=max(schedule.reduction_level.values(), default=0),
        barriers=tile.barriers,
        shared_bytes=tile.conversion_bytes,
    )


def _single(
    cost: Callable[[PlannedKernel, CostCoefficients], KernelCost],
) -> CostFunction:
    """The cost function of a scheme with one launch."""
    return lambda kernel, coefficients: (cost(kernel, coefficients),)


COSTS: Mapping[Scheme, CostFunction] = {
    "thread": _single(_flat_cost),
    "warp": _single(_row_cost),
    "block": _single(_row_cost),
    "looped": _single(looped_cost),
    "shared": _single(shared_cost),
    "split": split_costs,
    "column": two_stage_costs,
    "matrix": _single(dot_cost),
    "turned": _single(sequence_cost),
}
"""The cost function of each scheme."""
