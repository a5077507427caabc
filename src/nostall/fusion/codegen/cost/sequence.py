"""What a kernel asks of the GPU that takes small dots by turns, *modelled*.

A turn is a small tile; a few turns' loads are under way at once, as in other loops.  The fitted
figures are those of other kernels: none of this kind was among them.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.cost.dots import SHUFFLE_INSTRUCTIONS
from nostall.fusion.codegen.cost.gpu import KernelCost
from nostall.fusion.codegen.cost.thread_layout import ACCESS_BYTES, thread_layout
from nostall.fusion.codegen.cost.tile import CostCoefficients, dependent_loads, operator_cost
from nostall.fusion.codegen.loops.dot_axes import find_groups
from nostall.fusion.codegen.loops.mapping import loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import (
    WARP_SIZE,
    KernelPlan,
    positions_per_tile,
    sequence_tiling,
)
from nostall.fusion.codegen.tiling.sequence_tiles import SequenceTiling
from nostall.fusion.codegen.tiling.tile_sizes import group_lanes
from nostall.fusion.graph.operations import DTYPE_BYTES

_RESCALE_INSTRUCTIONS = 1.0
"""More of an element of a sum that follows a running maximum."""
_BASE_REGISTERS, _REGISTERS_PER_ELEMENT = 26.0, 0.7
"""Registers of a thread, and for each element of a turn, beside the sums that stay: of 23 kernels
of a query that Triton 3.6 compiled for sm_90 all are within a quarter, 14 within 10 %."""


def sequence_cost(schedule: Schedule, plan: KernelPlan, counts: CostCoefficients) -> KernelCost:
    """That of the only kernel of a ``turned`` plan."""
    mapping, graph, found = schedule.mapping, schedule.mapping.graph, sequence_tiling(schedule)
    tile = _SequenceTile(schedule, plan, found)
    turns = -(
        -schedule.count(schedule.loop_groups[found.group]) // positions_per_tile(schedule, plan)
    )
    each_turn, once = counts.iteration, counts.program
    barriers, held, phases = 0, 0.0, len(found.softmax_sums) + bool(found.accumulated)
    for index in mapping.operators:
        gone = mapping.reduced_loops.get(index, frozenset())
        each = tile.elements_per_thread(mapping.loops[index] | gone)
        if index in found.accumulated:
            held += each
            product = graph[index].kind == "dot"
            each_turn += each * (1 + product + _RESCALE_INSTRUCTIONS * (index in found.scaled_by))
            told, crossed = tile.exchange_cost(index, counts)
            once += each + told
            barriers += 2 * crossed
        elif gone:
            told, crossed = tile.exchange_cost(index, counts)
            cost = each * (2 if graph[index].kind == "dot" else 1) + told
            in_turn = index in found.in_loop
            each_turn, once = each_turn + cost * in_turn, once + cost * (not in_turn)
            barriers += 2 * crossed * (turns if in_turn else 1)
        elif index not in found.pass_through:
            cost = operator_cost(schedule, index, False, counts.operators) * each
            in_turn = index in found.in_loop
            each_turn, once = each_turn + cost * in_turn, once + cost * (not in_turn)
    in_turns, beside = tile.access_counts()
    moved = sum(graph[index].bytes for index in (*mapping.inputs, *mapping.outputs))
    elements = plan.elements_per_thread
    return KernelCost(
        programs=schedule.row_count,
        warps=plan.num_warps,
        instructions=once + turns * (each_turn + counts.access * in_turns) + counts.access * beside,
        registers=_BASE_REGISTERS + held + _REGISTERS_PER_ELEMENT * elements,
        memory_bytes=moved / schedule.row_count,
        iterations=turns,
        dependent_loads=dependent_loads(turns, elements),
        reduction_phases=phases,
        barriers=barriers if plan.num_warps > 1 else 0,
    )


class _SequenceTile:
    """The tensors of a turn, and those beside it."""

    def __init__(self, schedule: Schedule, plan: KernelPlan, found: SequenceTiling) -> None:
        self.schedule, self.plan, self.tiling = schedule, plan, found
        places = positions_per_tile(schedule, plan)
        widths = enumerate(group_lanes(schedule))
        self.lane_counts = tuple(places if at == found.group else lanes for at, lanes in widths)
        self.threads = WARP_SIZE * plan.num_warps

    def lanes(self, loops: frozenset[int]) -> int:
        return math.prod(
            self.lane_counts[at] for at in find_groups(loops, self.schedule.loop_groups)
        )

    def elements_per_thread(self, loops: frozenset[int]) -> float:
        return max(1.0, self.lanes(loops) / self.threads)

    def exchange_cost(self, index: int, counts: CostCoefficients) -> tuple[float, bool]:
        """Instructions by which lanes tell each other of a reduction; whether warps have to."""
        mapping = self.schedule.mapping
        rows, gone = self.lanes(mapping.loops[index]), self.lanes(mapping.reduced_loops[index])
        widest = ACCESS_BYTES // DTYPE_BYTES["float16"]
        if index in self.tiling.accumulated:
            # Places lie across the lanes and warps that the other axis leaves.
            lies = thread_layout(gone, rows, self.plan.num_warps, widest)
            across, crossed, rows_each = (
                WARP_SIZE // lies.lanes_per_row,
                self.plan.num_warps > 1,
                lies.vector,
            )
        else:
            lies = thread_layout(rows, gone, self.plan.num_warps, widest)
            across, crossed, rows_each = (
                lies.lanes_per_row,
                lies.warps_per_row > 1,
                lies.rows_per_thread,
            )
        told = SHUFFLE_INSTRUCTIONS * math.log2(max(1, across)) + counts.cross_warp * crossed
        return told * rows_each, crossed

    def access_counts(self) -> tuple[float, float]:
        """Of a thread in a turn, and beside the turns."""
        mapping, along = self.schedule.mapping, set(self.schedule.loop_groups[self.tiling.group])
        moved = [(one.source, loops_used(one.accesses)) for one in mapping.memory_operands]
        moved += [(index, mapping.loops[index]) for index in mapping.outputs]
        found = {True: 0.0, False: 0.0}
        for node, loops in moved:
            widest = ACCESS_BYTES // DTYPE_BYTES[mapping.graph[node].dtype]
            found[bool(loops & along)] += max(1.0, self.lanes(loops) / self.threads / widest)
        return found[True], found[False]
