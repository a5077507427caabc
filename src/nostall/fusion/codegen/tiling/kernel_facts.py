"""Facts of a schedule that plans, cost model and emitters ask again and again, computed once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache

from nostall.fusion.codegen.expressions.reductions import Reduction, make_reduction
from nostall.fusion.codegen.loops.reduction_levels import Pass, passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.loop_peeling import Peeling, find_peeling


class KernelFacts:
    """What holds of all kernels of one schedule, whichever plan they have."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    @cached_property
    def reductions(self) -> Mapping[int, Reduction]:
        """The templates of all reductions and dots, by node."""
        mapping = self.schedule.mapping
        nodes = (mapping.graph[index] for index in mapping.operators)
        return {n.index: make_reduction(n) for n in nodes if n.kind in ("reduce", "dot")}

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes over the columns of kernels that keep no row on chip."""
        return passes(self.schedule)

    @cached_property
    def peeling(self) -> Peeling | None:
        """How loops over unaligned rows are peeled; None if all rows are aligned."""
        return find_peeling(self.schedule)


@lru_cache(maxsize=32)
def kernel_facts(schedule: Schedule) -> KernelFacts:
    """The facts of a schedule, the same object for all of its plans."""
    return KernelFacts(schedule)
