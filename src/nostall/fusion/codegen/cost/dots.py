"""What a kernel with small dots asks of the GPU, *modelled*: one element of the batch a program.

Tensors lie over all threads of a program, one or two long axes each.  A dot's factors and whatever
lies along the other axis go through shared memory, which all warps wait for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nostall.fusion.codegen.cost.gpu import KernelCost
from nostall.fusion.codegen.cost.thread_layout import ACCESS_BYTES, thread_layout
from nostall.fusion.codegen.cost.tile import COEFFICIENTS, CostCoefficients, operator_cost
from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import BASE_REGISTERS, WARP_SIZE, KernelPlan
from nostall.fusion.codegen.tiling.tile_sizes import group_lanes
from nostall.fusion.graph.operations import DTYPE_BYTES

_MMA_PRODUCTS = 16 * 8 * 16
"""Products of one tensor-core instruction of a warp (``mma.m16n8k16``)."""
_MMA_ROWS = 16
"""Rows of a product that a warp has of one such instruction.  Triton gives the warps of a program
different rows, and those beyond the last row repeat the work of others."""
_FACTOR_BYTES = 2
"""Of an element of a factor in shared memory, for tensor cores."""
_FACTORS_PER_ACCESS = ACCESS_BYTES // _FACTOR_BYTES
SHUFFLE_INSTRUCTIONS = 2.0
"""Instructions by which half of the lanes tell the other half their parts: one goes, one puts
together."""


def dot_cost(
    schedule: Schedule, plan: KernelPlan, counts: CostCoefficients = COEFFICIENTS
) -> KernelCost:
    """That of the only kernel of a ``matrix`` plan."""
    mapping, graph = schedule.mapping, schedule.mapping.graph
    threads, apart = (
        WARP_SIZE * plan.num_warps,
        WARP_SIZE * _warps_with_distinct_rows(schedule, plan),
    )
    instructions, barriers, phases, shared = counts.program, 0, 0, 0
    outside: set[Operand] = set()
    for index in mapping.operators:
        operands, gone = mapping.operands[index], mapping.reduced_loops.get(index, frozenset())
        outside.update(one for one in operands if mapping.is_in_memory(one))
        each = max(1.0, _lanes(schedule, mapping.loops[index] | gone) / apart)
        if graph[index].kind == "dot" and all(dot_loops(mapping, index)):
            factors = sum(_lanes(schedule, loops_used(one.accesses)) for one in operands)
            of_tensor_cores = graph[index].dtype != "float32"
            instructions += each * WARP_SIZE / _MMA_PRODUCTS if of_tensor_cores else each
            # Written and read again, as many at once as an access takes.
            instructions += 2 * counts.access * factors / threads / _FACTORS_PER_ACCESS
            shared = max(shared, _FACTOR_BYTES * factors if of_tensor_cores else 0)
            barriers += 2
            phases += 1
        elif gone:
            # A product as well, where it is a dot with one long axis or two.
            instructions += each * (2 if graph[index].kind == "dot" else 1)
            kept, lost = _lanes(schedule, mapping.loops[index]), _lanes(schedule, gone)
            widest = (
                _contiguous_per_thread(schedule, index, threads)
                if graph[index].kind == "dot"
                else threads
            )
            lies = thread_layout(kept, lost, plan.num_warps, min(widest, _FACTORS_PER_ACCESS))
            meet = lies.warps_per_row > 1
            each_row = (
                SHUFFLE_INSTRUCTIONS * math.log2(lies.lanes_per_row) + counts.cross_warp * meet
            )
            instructions += each_row * lies.rows_per_thread
            barriers += 2 * meet
            phases += 1
        else:
            instructions += operator_cost(schedule, index, False, counts.operators) * each
    instructions += counts.access * _access_count(schedule, outside, threads)
    moved = sum(graph[index].bytes for index in (*mapping.inputs, *mapping.outputs))
    return KernelCost(
        programs=schedule.row_count,
        warps=plan.num_warps,
        instructions=instructions,
        registers=BASE_REGISTERS
        + counts.live_share * schedule.peak_live_values * sum(plan.chunks) / apart,
        memory_bytes=moved / schedule.row_count,
        reduction_phases=phases,
        barriers=barriers if plan.num_warps > 1 else 0,
        shared_bytes=shared,
    )


def _contiguous_per_thread(schedule: Schedule, index: int, threads: int) -> int:
    """Elements of a thread beside each other in a sum of products.  A vector that is read lies as
    the matrix does if it has fewer elements than there are threads, else the matrix lies as the
    vector does (seen with Triton 3.6)."""
    operands = schedule.mapping.operands[index]
    read = [
        _lanes(schedule, loops_used(one.accesses))
        for one in operands
        if schedule.mapping.is_in_memory(one)
    ]
    vector = min(read, default=0)
    return threads if vector < threads else vector // threads


def _warps_with_distinct_rows(schedule: Schedule, plan: KernelPlan) -> int:
    """The warps of a program that have elements of their own: all, or as tensor cores share out the
    rows of the largest product."""
    graph, rows = schedule.mapping.graph, 0
    for index in schedule.mapping.operators:
        if graph[index].kind == "dot" and graph[index].dtype != "float32":
            found = dot_loops(schedule.mapping, index)
            rows = max(rows, _lanes(schedule, found[0]) if all(found) else 0)
    return min(plan.num_warps, max(1, rows // _MMA_ROWS)) if rows else plan.num_warps


def _access_count(schedule: Schedule, outside: Iterable[Operand], threads: int) -> float:
    """Of a thread, to what is read from outside and what is written."""
    read = [(one.source, loops_used(one.accesses)) for one in outside]
    written = [(index, schedule.mapping.loops[index]) for index in schedule.mapping.outputs]
    found = 0.0
    for node, loops in (*read, *written):
        widest = ACCESS_BYTES // DTYPE_BYTES[schedule.mapping.graph[node].dtype]
        found += max(1.0, _lanes(schedule, loops) / threads / widest)
    return found


def _lanes(schedule: Schedule, loops: frozenset[int]) -> int:
    """Of a tensor that counts through these loops."""
    widths = group_lanes(schedule)
    return math.prod(widths[at] for at in find_groups(loops, schedule.loop_groups))
