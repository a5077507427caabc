"""What the kernels of a plan ask of the GPU, *modelled*: scheme by scheme, nothing is compiled.

A *demand* is that of one program: instructions of each warp, registers of each thread, bytes, and
how often its warps wait for memory and for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nostall.fusion.codegen.cost.dots import dot_cost
from nostall.fusion.codegen.cost.gpu import KernelCost
from nostall.fusion.codegen.cost.sequence import sequence_cost
from nostall.fusion.codegen.cost.tile import (
    COEFFICIENTS,
    CostCoefficients,
    TileCost,
    dependent_loads,
    tile_cost,
)
from nostall.fusion.codegen.emit.two_stage import finish_tile
from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.loops.reduction_levels import Pass, ValueKey, passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import (
    async_copy_bytes,
    loop_operands,
    pipelined_load_waits,
)
from nostall.fusion.codegen.tiling.kernel_plan import WARP_SIZE, KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import lanes_per_row
from nostall.fusion.codegen.tiling.on_chip import rematerialization_options, values_along
from nostall.fusion.graph.operations import DTYPE_BYTES

_PARTIAL_RESULT_BYTES = 4
"""Bytes of a partial result."""
SECTOR_BYTES = 32
"""Memory gives that much at least."""
_SECTOR_PAIR_BYTES = 64
"""Of two sectors, which memory likes to give together (seen: runs of one take longer)."""
_RESCALE_INSTRUCTIONS = 3.0
"""Instructions for each element of a pair of reductions with one walk, beside the exp and the two
that reductions take."""
_COMBINE_INSTRUCTIONS = 60.0
"""Instructions of a kernel that only puts partial results together, assumed."""


def kernel_costs(
    schedule: Schedule, plan: KernelPlan, counts: CostCoefficients = COEFFICIENTS
) -> tuple[KernelCost, ...]:
    """Those of all kernels of a plan, in their order."""
    if plan.scheme == "matrix":
        return (dot_cost(schedule, plan, counts),)
    if plan.scheme == "turned":
        return (sequence_cost(schedule, plan, counts),)
    if plan.scheme == "shared":
        return (_shared_cost(schedule, plan, counts),)
    if plan.scheme == "looped":
        return (_looped_cost(schedule, plan, counts),)
    if plan.scheme == "split":
        return tuple(_split_cost(schedule, plan, part, counts) for part in passes(schedule))
    if plan.scheme == "column":
        return _first_stage_cost(schedule, plan, counts), _second_stage_cost(schedule, plan)
    return (_register_cost(schedule, plan, counts),)


def _register_cost(schedule: Schedule, plan: KernelPlan, counts: CostCoefficients) -> KernelCost:
    """Whole rows in registers, or no rows at all."""
    flat = plan.scheme == "thread"
    programs = -(-schedule.row_count // (plan.chunks[0] if flat else plan.rows))
    tile = tile_cost(schedule, plan, plan.chunks, schedule.body, schedule.mapping.outputs, counts)
    moved = _tensor_bytes(schedule, schedule.mapping.inputs, schedule.mapping.outputs) / programs
    found = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=counts.program + tile.instructions,
        registers=tile.registers,
        memory_bytes=moved,
        reduction_phases=_reduction_depth(schedule),
        barriers=tile.barriers,
        shared_bytes=tile.conversion_bytes,
    )
    return found if flat else _with_sector_waste(schedule, plan, found)


def _looped_cost(schedule: Schedule, plan: KernelPlan, counts: CostCoefficients) -> KernelCost:
    programs = -(-schedule.row_count // plan.rows)
    turns = -(-lanes_per_row(schedule, plan.peeled) // plan.chunks[0])
    parts = passes(schedule)
    instructions, registers, barriers, read = counts.program, 0.0, 0.0, 0.0
    steps, hidden = 0.0, 0.0
    for part in parts:
        tile = _iteration_cost(schedule, plan, part, counts)
        instructions += turns * (
            tile.instructions + _async_copy_instructions(schedule, plan, tile, counts)
        )
        registers = max(registers, tile.registers)
        barriers += tile.barriers + turns * plan.async_copies
        steps += (
            1 if plan.async_copies else dependent_loads(turns, tile.elements)
        ) * part.has_columns
        hidden += pipelined_load_waits(turns) * (plan.async_copies and part.has_columns)
        read += _tensor_bytes(
            schedule, schedule.mapping.inputs_of((*part.column_operators, *part.reductions)), ()
        )
    once = _tensor_bytes(schedule, schedule.mapping.inputs, ())
    moved = _tensor_bytes(schedule, schedule.mapping.inputs, schedule.mapping.outputs) / programs
    found = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=instructions,
        registers=registers,
        memory_bytes=moved,
        iterations=turns * len(passes(schedule)),
        dependent_loads=steps,
        overlapped_loads=hidden,
        reduction_phases=sum(bool(part.reductions) for part in parts),
        barriers=barriers,
        shared_bytes=_async_copy_bytes(schedule, plan),
        reread_bytes=max(0.0, read - once) / programs,
    )
    return _with_sector_waste(schedule, plan, found)


def _shared_cost(schedule: Schedule, plan: KernelPlan, counts: CostCoefficients) -> KernelCost:
    """Rows in shared memory: as :func:`_looped_cost`, but what is kept is neither read nor computed
    again.  Accesses to shared memory take the instructions that those to memory do."""
    kept = rematerialization_options(schedule, plan.async_copies, plan.peeled)[plan.rematerialized]
    held = kept.arena(plan.chunks[0])
    instructions, registers, barriers, steps = counts.program, 0.0, 0.0, 0.0
    known: set[ValueKey] = set()
    again = 0.0
    by_row = values_along(schedule, schedule.rows)
    for part in kept.passes:
        tile = _iteration_cost(schedule, plan, part, counts)
        left = [
            v
            for v in (*part.operands, *part.column_operators)
            if v in kept.passes_using and v not in part.on_chip
        ]
        ours = sum(isinstance(value, int) for value in part.operands) + len(left)
        reads = [v for v in part.operands if isinstance(v, Operand) and v not in part.on_chip]
        early = [value for value in reads if kept.is_prefetched(value)]
        again += sum(
            _tensor_bytes(schedule, [v.source], ()) for v in reads if v in known and v in by_row
        )
        known.update(reads)
        instructions += held.chunks * (tile.instructions + counts.access * ours * tile.accesses)
        registers = max(registers, tile.registers)
        barriers += tile.barriers + part.has_columns + bool(early)
        steps += bool(early) + dependent_loads(held.chunks, tile.elements) * (
            len(reads) > len(early)
        )
    moved = (
        _tensor_bytes(schedule, schedule.mapping.inputs, schedule.mapping.outputs)
        / schedule.row_count
    )
    found = KernelCost(
        programs=schedule.row_count,
        warps=plan.num_warps,
        instructions=instructions,
        registers=registers,
        memory_bytes=moved,
        iterations=held.chunks * len(kept.passes),
        dependent_loads=steps,
        reduction_phases=_reduction_depth(schedule),
        barriers=barriers,
        shared_bytes=held.total_bytes,
        reread_bytes=again / schedule.row_count,
    )
    return _with_sector_waste(schedule, plan, found)


def _split_cost(
    schedule: Schedule, plan: KernelPlan, part: Pass, counts: CostCoefficients
) -> KernelCost:
    """One pass; the partial results of those before are read by every program."""
    groups = -(-schedule.row_count // plan.rows)
    finished = len(part.accumulators(part.finished_reductions))
    partial = _PARTIAL_RESULT_BYTES * schedule.row_count * plan.splits * finished
    if not part.has_columns:
        return KernelCost(
            programs=groups,
            warps=plan.num_warps,
            instructions=_COMBINE_INSTRUCTIONS,
            registers=counts.base_registers,
            memory_bytes=partial / groups,
            reduction_phases=1.0,
            barriers=2,
        )
    turns = -(-lanes_per_row(schedule, plan.peeled) // (plan.chunks[0] * plan.splits))
    tile = _iteration_cost(schedule, plan, part, counts)
    programs = groups * plan.splits
    reads = schedule.mapping.inputs_of((*part.column_operators, *part.reductions))
    made = (
        _PARTIAL_RESULT_BYTES
        * schedule.row_count
        * plan.splits
        * len(part.accumulators(part.reductions))
    )
    moved = _tensor_bytes(schedule, reads, part.column_outputs) + made + partial * plan.splits
    found = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=counts.program
        + counts.cross_warp * finished
        + turns * (tile.instructions + _async_copy_instructions(schedule, plan, tile, counts)),
        registers=tile.registers,
        memory_bytes=moved / programs,
        iterations=turns,
        dependent_loads=1 if plan.async_copies else dependent_loads(turns, tile.elements),
        overlapped_loads=pipelined_load_waits(turns) if plan.async_copies else 0.0,
        reduction_phases=float(finished > 0),
        barriers=tile.barriers + turns * plan.async_copies + 2 * finished * (plan.num_warps > 1),
        shared_bytes=_async_copy_bytes(schedule, plan),
    )
    return _with_sector_waste(schedule, plan, found)


def _first_stage_cost(schedule: Schedule, plan: KernelPlan, counts: CostCoefficients) -> KernelCost:
    """The first kernel of ``column``: groups of rows one after the other."""
    summed = schedule.count(schedule.reduced_rows)
    turns = -(-summed // (plan.rows * plan.splits))
    programs = schedule.row_count // summed * plan.splits
    outputs = [index for index in schedule.body if index in schedule.mapping.outputs]
    operators, held = (*schedule.body, *schedule.row_reductions), len(schedule.row_reductions)
    tile = tile_cost(
        schedule, plan, plan.chunks, operators, outputs, counts, held=held, walked=True
    )
    moved = _tensor_bytes(
        schedule, schedule.mapping.inputs, outputs
    ) + _PARTIAL_RESULT_BYTES * plan.splits * _row_reduction_results(schedule)
    found = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=counts.program
        + turns * (tile.instructions + _async_copy_instructions(schedule, plan, tile, counts)),
        registers=tile.registers,
        memory_bytes=moved / programs,
        iterations=turns,
        dependent_loads=1 if plan.async_copies else turns,
        overlapped_loads=pipelined_load_waits(turns) if plan.async_copies else 0.0,
        # What the next turn loads waits for no reduction of this one.
        reduction_phases=_reduction_depth(schedule),
        barriers=turns * (tile.barriers + plan.async_copies),
        shared_bytes=tile.conversion_bytes + _async_copy_bytes(schedule, plan),
    )
    return _with_sector_waste(schedule, plan, found)


def _second_stage_cost(schedule: Schedule, plan: KernelPlan) -> KernelCost:
    """The second one: partial results are added up."""
    results = _row_reduction_results(schedule)
    width, warps = finish_tile(plan.splits, results)
    programs = max(1, -(-results // width))
    each = width * plan.splits / (WARP_SIZE * warps)
    moved = _PARTIAL_RESULT_BYTES * plan.splits * results / programs
    return KernelCost(
        programs=programs,
        warps=warps,
        instructions=_COMBINE_INSTRUCTIONS + 2 * each,
        registers=COEFFICIENTS.base_registers + each,
        memory_bytes=moved,
        reduction_phases=1.0,
        barriers=2,
    )


def _iteration_cost(
    schedule: Schedule, plan: KernelPlan, part: Pass, counts: CostCoefficients
) -> TileCost:
    """One step of a loop over columns: accumulators stay."""
    running = part.accumulators(part.reductions)
    operators, held = sorted((*part.column_operators, *running)), len(running)
    chunks, outputs = plan.chunks[:1], part.column_outputs
    tile = tile_cost(schedule, plan, chunks, operators, outputs, counts, held=held, turned=True)
    more = (
        len(part.reduced_pairs)
        * (counts.operators["share"] + _RESCALE_INSTRUCTIONS)
        * tile.elements
    )
    return replace(tile, instructions=tile.instructions + more)


def _async_copy_instructions(
    schedule: Schedule, plan: KernelPlan, tile: TileCost, counts: CostCoefficients
) -> float:
    """Instructions that a turn has more where what it reads is copied before."""
    return (
        counts.access * tile.accesses * len(loop_operands(schedule)) if plan.async_copies else 0.0
    )


def _async_copy_bytes(schedule: Schedule, plan: KernelPlan) -> int:
    """Bytes of shared memory for the turns that come."""
    return async_copy_bytes(schedule, plan.rows * sum(plan.chunks)) if plan.async_copies else 0


def _with_sector_waste(schedule: Schedule, plan: KernelPlan, demand: KernelCost) -> KernelCost:
    """With what comes of short runs, where rows lie along memory and a tile has few of them: bytes
    that come along unasked (programs beside it need those), sectors that are written in parts, and
    those that come without the other one of their pair."""
    if not schedule.is_column_major:
        return demand
    graph, outputs = schedule.mapping.graph, set(schedule.mapping.outputs)
    needed = wasted = partial = single = 0.0
    for index in (*schedule.mapping.inputs, *schedule.mapping.outputs):
        run, moved = plan.rows * DTYPE_BYTES[graph[index].dtype], graph[index].bytes
        more = moved * max(0.0, SECTOR_BYTES / run - 1)
        needed += moved
        wasted += more
        partial += more * (index in outputs)
        single += moved * (run < _SECTOR_PAIR_BYTES)
    share = 1 / max(1.0, needed)
    return replace(
        demand,
        overfetched_bytes=(demand.memory_bytes + demand.reread_bytes) * wasted * share,
        partial_sector_bytes=demand.memory_bytes * partial * share,
        unpaired_sector_bytes=demand.memory_bytes * single * share,
    )


def _reduction_depth(schedule: Schedule) -> int:
    return max(schedule.reduction_level.values(), default=0)


def _row_reduction_results(schedule: Schedule) -> int:
    return sum(schedule.mapping.graph[index].elements for index in schedule.row_reductions)


def _tensor_bytes(schedule: Schedule, reads: Iterable[int], writes: Iterable[int]) -> float:
    return float(sum(schedule.mapping.graph[index].bytes for index in (*reads, *writes)))
