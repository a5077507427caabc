"""The default plan of a schedule: the legal plan with the least modelled time.

Plans that read a row more often than Inductor's kernel, or in shorter iterations
(:mod:`~nostall.fusion.codegen.cost.inductor_loops`), come last.  Autotuning
(:mod:`nostall.fusion.codegen.autotune`) may replace the default plan by one that was measured.
"""

from __future__ import annotations

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.gpu import kernel_seconds
from nostall.fusion.codegen.cost.inductor_loops import exceeds_inductor
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel


def default_plan(schedule: Schedule) -> PlannedKernel:
    """The kernel with the least :func:`sort_key`.  Raises :class:`BadInput` if no plan is legal."""
    space = plans(schedule)
    if not space.legal:
        reasons = "; ".join(f"{each.plan}: {each.reason}" for each in space.illegal[:3])
        raise BadInput(
            f"none of {len(space.illegal)} plans fits ({reasons}); make smaller kernels of these "
            "operators"
        )
    return min(space.legal, key=sort_key)


def sort_key(kernel: PlannedKernel) -> tuple[bool, float, int, str]:
    """Orders kernels by the rule about Inductor's loops, by modelled time, by fewer rows, by name."""
    return exceeds_inductor(kernel), modelled_seconds(kernel), kernel.plan.rows, str(kernel.plan)


def modelled_seconds(kernel: PlannedKernel) -> float:
    """Seconds that all launches of a kernel take on an H200, *modelled*."""
    return sum(kernel_seconds(cost) for cost in kernel_costs(kernel))
