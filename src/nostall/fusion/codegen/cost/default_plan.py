"""Which plan to try first: a modelled time for each, before anything was measured.

It orders plans, no more; what is chosen for good is up to measurement.  What kernels ask for and
how long that takes is said in ``demand`` and ``sm``.
"""

from __future__ import annotations

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.gpu import kernel_seconds
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, plans


def default_plan(schedule: Schedule) -> KernelPlan:
    """The plan with the least modelled time.  Raises :class:`BadInput` where none is legal."""
    found = plans(schedule)
    if not found.legal:
        reasons = "; ".join(f"{r.plan}: {r.reason}" for r in found.illegal[:3])
        raise BadInput(
            f"none of {len(found.illegal)} plans fits ({reasons}); make smaller kernels of these "
            "operators"
        )
    return min(found.legal, key=lambda plan: sort_key(schedule, plan))


def sort_key(schedule: Schedule, plan: KernelPlan) -> tuple[float, int, str]:
    """What orders plans: the modelled time, then the fewest rows, which share less."""
    return modelled_seconds(schedule, plan), plan.rows, str(plan)


def modelled_seconds(schedule: Schedule, plan: KernelPlan) -> float:
    """Seconds that the kernels of a plan would take on an H200, *modelled*."""
    return sum(kernel_seconds(demand) for demand in kernel_costs(schedule, plan))
