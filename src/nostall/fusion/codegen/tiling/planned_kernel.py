"""Planned kernels: a schedule with a plan that was checked to be legal for it, and its facts.

Facts are what cost model and emitters ask of a schedule again and again; they are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from nostall.fusion.codegen.expressions.reductions import Reduction, make_reduction
from nostall.fusion.codegen.loops.reduction_levels import Pass, passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.loop_peeling import Peeling, find_peeling, lanes_per_row
from nostall.fusion.codegen.tiling.sequence_tiles import SequenceTiling, find_sequence_tiling
from nostall.fusion.codegen.tiling.tile_sizes import positions_per_tile
from nostall.fusion.errors import BadFusion


class KernelFacts:
    """Facts of a schedule that do not depend on the plan of its kernel, each computed once."""

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


@dataclass(frozen=True)
class PlannedKernel:
    """A schedule and a legal plan for it: everything that cost model and emitters need.

    Use :func:`plan_kernel` or :func:`~nostall.fusion.codegen.tiling.plan_space.plans` to make one:
    both check the plan. The cost model and the emitters do not check it again.
    """

    schedule: Schedule = field(repr=False)
    plan: KernelPlan

    def variant(self, **changes: Any) -> PlannedKernel | None:
        """The same schedule with fields of the plan changed; None if that plan is illegal."""
        plan = replace(self.plan, **changes)
        return None if illegal_reason(self.schedule, plan) else PlannedKernel(self.schedule, plan)

    @property
    def facts(self) -> KernelFacts:
        """What the kernel has in common with those of other plans."""
        return kernel_facts(self.schedule)

    @property
    def peeling(self) -> Peeling | None:
        """How its loops over unaligned rows are peeled; None if they are not."""
        return self.facts.peeling if self.plan.peeled else None

    @property
    def lanes_per_row(self) -> int:
        """The maximum number of lanes of a row: its columns, and peeled lanes before them."""
        return lanes_per_row(self.schedule, self.plan.peeled)

    @property
    def sequence_tiling(self) -> SequenceTiling:
        """Division of the sequence into tiles; for plans of the scheme ``turned`` only."""
        tiling = find_sequence_tiling(self.schedule)
        assert isinstance(tiling, SequenceTiling)  # else the plan would be illegal
        return tiling

    @property
    def positions_per_tile(self) -> int:
        """Positions of the sequence in one tile; for plans of the scheme ``turned`` only."""
        group = self.sequence_tiling.group
        return positions_per_tile(self.schedule, group, self.plan.chunks[0])

    def __str__(self) -> str:
        return str(self.plan)


def plan_kernel(schedule: Schedule, plan: KernelPlan) -> PlannedKernel:
    """Check a plan and put it together with its schedule.

    Raises :class:`BadFusion` with the reason if the plan is illegal.
    """
    reason = illegal_reason(schedule, plan)
    if reason is not None:
        raise BadFusion(f"plan {plan} does not fit: {reason}; take one of plans(schedule).legal")
    return PlannedKernel(schedule, plan)
