"""Planned kernels: a schedule with a plan that was checked to be legal for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_facts import KernelFacts, kernel_facts
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.loop_peeling import Peeling, lanes_per_row
from nostall.fusion.codegen.tiling.sequence_tiles import SequenceTiling, find_sequence_tiling
from nostall.fusion.codegen.tiling.tile_sizes import positions_per_tile
from nostall.fusion.errors import BadFusion


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
