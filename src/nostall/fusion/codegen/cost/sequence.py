"""What a kernel asks of the GPU that takes small dots by turns, *modelled*.

A turn is a small tile; a few turns' loads are under way at once, as in other loops.  The fitted
figures are those of other kernels: none of this kind was among them.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.cost.dots import TOLD
from nostall.fusion.codegen.cost.gpu import Demand
from nostall.fusion.codegen.cost.thread_layout import ACCESS_BYTES, spread
from nostall.fusion.codegen.cost.tile import Counts, cost_of, waiting
from nostall.fusion.codegen.loops.dot_axes import groups_of
from nostall.fusion.codegen.loops.mapping import used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import WARP, KernelPlan, turn_of, turn_places
from nostall.fusion.codegen.tiling.sequence_tiles import Walk
from nostall.fusion.codegen.tiling.tile_sizes import matrix_widths
from nostall.fusion.graph.operations import DTYPE_BYTES

_RESCALED = 1.0
"""More of an element of a sum that follows a running maximum."""
_OTHERS, _EACH = 26.0, 0.7
"""Registers of a thread, and for each element of a turn, beside the sums that stay: of 23 kernels
of a query that Triton 3.6 compiled for sm_90 all are within a quarter, 14 within 10 %."""


def turned_demand(of: Schedule, plan: KernelPlan, counts: Counts) -> Demand:
    """That of the only kernel of a ``turned`` plan."""
    mapping, graph, found = of.mapping, of.mapping.graph, turn_of(of)
    tile = _Tile(of, plan, found)
    turns = -(-of.count(of.groups[found.group]) // turn_places(of, plan))
    each_turn, once = counts.step, counts.program
    barriers, held, phases = 0, 0.0, len(found.totals) + bool(found.results)
    for index in mapping.operators:
        gone = mapping.reduced.get(index, frozenset())
        each = tile.each(mapping.loops[index] | gone)
        if index in found.results:
            held += each
            product = graph[index].kind == "dot"
            each_turn += each * (1 + product + _RESCALED * (index in found.scaled))
            told, crossed = tile.told(index, counts)
            once += each + told
            barriers += 2 * crossed
        elif gone:
            told, crossed = tile.told(index, counts)
            cost = each * (2 if graph[index].kind == "dot" else 1) + told
            in_turn = index in found.during
            each_turn, once = each_turn + cost * in_turn, once + cost * (not in_turn)
            barriers += 2 * crossed * (turns if in_turn else 1)
        elif index not in found.bare:
            cost = cost_of(of, index, False, counts.operators) * each
            in_turn = index in found.during
            each_turn, once = each_turn + cost * in_turn, once + cost * (not in_turn)
    in_turns, beside = tile.accesses()
    moved = sum(graph[index].bytes for index in (*mapping.inputs, *mapping.outputs))
    elements = plan.elements_per_thread
    return Demand(
        programs=of.row_count,
        warps=plan.num_warps,
        instructions=once + turns * (each_turn + counts.access * in_turns) + counts.access * beside,
        registers=_OTHERS + held + _EACH * elements,
        moved=moved / of.row_count,
        turns=turns,
        steps=waiting(turns, elements),
        phases=phases,
        barriers=barriers if plan.num_warps > 1 else 0,
    )


class _Tile:
    """The tensors of a turn, and those beside it."""

    def __init__(self, of: Schedule, plan: KernelPlan, found: Walk) -> None:
        self.of, self.plan, self.found = of, plan, found
        places = turn_places(of, plan)
        widths = enumerate(matrix_widths(of))
        self.widths = tuple(places if at == found.group else lanes for at, lanes in widths)
        self.threads = WARP * plan.num_warps

    def lanes(self, loops: frozenset[int]) -> int:
        return math.prod(self.widths[at] for at in groups_of(loops, self.of.groups))

    def each(self, loops: frozenset[int]) -> float:
        return max(1.0, self.lanes(loops) / self.threads)

    def told(self, index: int, counts: Counts) -> tuple[float, bool]:
        """Instructions by which lanes tell each other of a reduction; whether warps have to."""
        mapping = self.of.mapping
        rows, gone = self.lanes(mapping.loops[index]), self.lanes(mapping.reduced[index])
        widest = ACCESS_BYTES // DTYPE_BYTES["float16"]
        if index in self.found.results:
            # Places lie across the lanes and warps that the other axis leaves.
            lies = spread(gone, rows, self.plan.num_warps, widest)
            across, crossed, rows_each = WARP // lies.lanes, self.plan.num_warps > 1, lies.vector
        else:
            lies = spread(rows, gone, self.plan.num_warps, widest)
            across, crossed, rows_each = lies.lanes, lies.warps > 1, lies.rows
        told = TOLD * math.log2(max(1, across)) + counts.across_warps * crossed
        return told * rows_each, crossed

    def accesses(self) -> tuple[float, float]:
        """Of a thread in a turn, and beside the turns."""
        mapping, along = self.of.mapping, set(self.of.groups[self.found.group])
        moved = [(one.source, used(one.places)) for one in mapping.reads]
        moved += [(index, mapping.loops[index]) for index in mapping.outputs]
        found = {True: 0.0, False: 0.0}
        for node, loops in moved:
            widest = ACCESS_BYTES // DTYPE_BYTES[mapping.graph[node].dtype]
            found[bool(loops & along)] += max(1.0, self.lanes(loops) / self.threads / widest)
        return found[True], found[False]
