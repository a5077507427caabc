"""Modelled cost of kernels that loop over columns: schemes ``looped``, ``split``, ``shared``."""

from __future__ import annotations

from dataclasses import replace

from nostall.fusion.codegen.cost.coefficients import CostCoefficients
from nostall.fusion.codegen.cost.gpu import (
    PARTIAL_RESULT_BYTES,
    KernelCost,
    tensor_bytes,
    with_sector_waste,
)
from nostall.fusion.codegen.cost.tile import TileCost, TileWork, dependent_loads, tile_cost
from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.loops.reduction_levels import Pass, ValueKey
from nostall.fusion.codegen.tiling.async_copies import (
    async_copy_bytes,
    loop_operands,
    pipelined_load_waits,
)
from nostall.fusion.codegen.tiling.on_chip import (
    OnChipValues,
    rematerialization_options,
    values_along,
)
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel

_RESCALE_INSTRUCTIONS = 3.0
"""Instructions for each element of an online softmax, besides the exp and the two reductions."""
_SPREAD_INSTRUCTIONS = 9.0
"""Instructions for each element of an online variance, besides both reductions: the reciprocal of
the number of elements, and the difference that it scales."""
COMBINE_INSTRUCTIONS = 60.0
"""Instructions of a kernel that only combines partial results; assumed, not counted."""


def looped_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost of the only kernel of the scheme ``looped``."""
    schedule, plan = kernel.schedule, kernel.plan
    mapping = schedule.mapping
    programs = -(-schedule.row_count // plan.rows)
    iterations = -(-kernel.lanes_per_row // plan.chunks[0])
    instructions, registers, barriers, read = coefficients.program, 0.0, 0.0, 0.0
    waits, overlapped = 0.0, 0.0
    for part in kernel.facts.passes:
        tile = _iteration_cost(kernel, part, coefficients)
        copies = async_copy_instructions(kernel, tile, coefficients)
        instructions += iterations * (tile.instructions + copies)
        registers = max(registers, tile.registers)
        barriers += tile.barriers + iterations * plan.async_copies
        pass_waits = 1 if plan.async_copies else dependent_loads(iterations, tile.elements)
        waits += pass_waits * part.has_columns
        overlapped += pipelined_load_waits(iterations) * (plan.async_copies and part.has_columns)
        inputs = mapping.inputs_of((*part.column_operators, *part.reductions))
        read += tensor_bytes(schedule, inputs, ())
    read_once = tensor_bytes(schedule, mapping.inputs, ())
    cost = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=instructions,
        registers=registers,
        memory_bytes=tensor_bytes(schedule, mapping.inputs, mapping.outputs) / programs,
        iterations=iterations * len(kernel.facts.passes),
        dependent_loads=waits,
        overlapped_loads=overlapped,
        reduction_phases=sum(bool(part.reductions) for part in kernel.facts.passes),
        barriers=barriers,
        shared_bytes=tile_copy_bytes(kernel),
        reread_bytes=max(0.0, read - read_once) / programs,
    )
    return with_sector_waste(kernel, cost)


def split_costs(kernel: PlannedKernel, coefficients: CostCoefficients) -> tuple[KernelCost, ...]:
    """The costs of the kernels of the scheme ``split``, one for each pass."""
    return tuple(_split_cost(kernel, part, coefficients) for part in kernel.facts.passes)


def _split_cost(kernel: PlannedKernel, part: Pass, coefficients: CostCoefficients) -> KernelCost:
    """One pass. Every program reads the partial results of the pass before."""
    schedule, plan = kernel.schedule, kernel.plan
    groups = -(-schedule.row_count // plan.rows)
    finished = len(part.finished_accumulators)
    partial_bytes = PARTIAL_RESULT_BYTES * schedule.row_count * plan.splits * finished
    if not part.has_columns:
        return KernelCost(
            programs=groups,
            warps=plan.num_warps,
            instructions=COMBINE_INSTRUCTIONS,
            registers=coefficients.base_registers,
            memory_bytes=partial_bytes / groups,
            reduction_phases=1.0,
            barriers=2,
        )
    copies = plan.async_copies
    iterations = -(-kernel.lanes_per_row // (plan.chunks[0] * plan.splits))
    tile = _iteration_cost(kernel, part, coefficients)
    programs = groups * plan.splits
    reads = schedule.mapping.inputs_of((*part.column_operators, *part.reductions))
    results = len(part.accumulators)
    moved = tensor_bytes(schedule, reads, part.column_outputs)
    moved += PARTIAL_RESULT_BYTES * schedule.row_count * plan.splits * results
    moved += partial_bytes * plan.splits
    copying = async_copy_instructions(kernel, tile, coefficients)
    cost = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=coefficients.program
        + coefficients.cross_warp * finished
        + iterations * (tile.instructions + copying),
        registers=tile.registers,
        memory_bytes=moved / programs,
        iterations=iterations,
        dependent_loads=1 if copies else dependent_loads(iterations, tile.elements),
        overlapped_loads=pipelined_load_waits(iterations) if copies else 0.0,
        reduction_phases=float(finished > 0),
        barriers=tile.barriers + iterations * copies + 2 * finished * (plan.num_warps > 1),
        shared_bytes=tile_copy_bytes(kernel),
    )
    return with_sector_waste(kernel, cost)


def shared_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost of the only kernel of the scheme ``shared``.

    As :func:`looped_cost`, but values in shared memory are neither loaded nor computed again. An
    access to shared memory has the instructions of an access to global memory.
    """
    schedule, plan = kernel.schedule, kernel.plan
    options = rematerialization_options(schedule, plan.async_copies, plan.peeled)
    on_chip = options[plan.rematerialized]
    arena = on_chip.arena(plan.chunks[0])
    instructions, registers, barriers, waits = coefficients.program, 0.0, 0.0, 0.0
    already_read: set[ValueKey] = set()
    reread = 0.0
    with_rows = values_along(schedule, schedule.rows)
    for part in on_chip.passes:
        tile = _iteration_cost(kernel, part, coefficients)
        reads = [v for v in part.operands if isinstance(v, Operand) and v not in part.on_chip]
        prefetched = [value for value in reads if on_chip.is_prefetched(value)]
        reread_values = [v for v in reads if v in already_read and v in with_rows]
        reread += sum(tensor_bytes(schedule, [value.source], ()) for value in reread_values)
        already_read.update(reads)
        shared = coefficients.access * _shared_accesses(on_chip, part) * tile.accesses
        instructions += arena.chunks * (tile.instructions + shared)
        registers = max(registers, tile.registers)
        barriers += tile.barriers + part.has_columns + bool(prefetched)
        loop_waits = dependent_loads(arena.chunks, tile.elements)
        waits += bool(prefetched) + loop_waits * (len(reads) > len(prefetched))
    moved = tensor_bytes(schedule, schedule.mapping.inputs, schedule.mapping.outputs)
    cost = KernelCost(
        programs=schedule.row_count,
        warps=plan.num_warps,
        instructions=instructions,
        registers=registers,
        memory_bytes=moved / schedule.row_count,
        iterations=arena.chunks * len(on_chip.passes),
        dependent_loads=waits,
        reduction_phases=max(schedule.reduction_level.values(), default=0),
        barriers=barriers,
        shared_bytes=arena.total_bytes,
        reread_bytes=reread / schedule.row_count,
    )
    return with_sector_waste(kernel, cost)


def _shared_accesses(on_chip: OnChipValues, part: Pass) -> int:
    """Values that a pass loads from shared memory, or stores there for a later pass."""
    values = (*part.operands, *part.column_operators)
    stored = [v for v in values if v in on_chip.passes_using and v not in part.on_chip]
    return sum(isinstance(value, int) for value in part.operands) + len(stored)


def _iteration_cost(kernel: PlannedKernel, part: Pass, coefficients: CostCoefficients) -> TileCost:
    """One iteration of the loop of a pass; accumulators stay in registers."""
    operators = sorted((*part.column_operators, *part.accumulators))
    work = TileWork(operators, part.column_outputs, len(part.accumulators), "columns")
    tile = tile_cost(kernel, kernel.plan.chunks[:1], work, coefficients)
    instructions = coefficients.operators["share"] + _RESCALE_INSTRUCTIONS
    online = len(part.reduced_pairs) * instructions * tile.elements
    online += len(part.reduced_variances) * _SPREAD_INSTRUCTIONS * tile.elements
    return replace(tile, instructions=tile.instructions + online)


def async_copy_instructions(
    kernel: PlannedKernel, tile: TileCost, coefficients: CostCoefficients
) -> float:
    """Instructions that asynchronous copies add to a loop iteration."""
    if not kernel.plan.async_copies:
        return 0.0
    return coefficients.access * tile.accesses * len(loop_operands(kernel.schedule))


def tile_copy_bytes(kernel: PlannedKernel) -> int:
    """Shared memory for the loop iterations that are copied in advance."""
    plan = kernel.plan
    if not plan.async_copies:
        return 0
    return async_copy_bytes(kernel.schedule, plan.rows * sum(plan.chunks))
