"""The default plan of a schedule: the legal plan with the least modelled time.

Three kinds of plans come last, because the model is not exact enough to choose them: those that
read a row more often than Inductor's kernel or in shorter iterations
(:mod:`~nostall.fusion.codegen.cost.inductor_loops`), those that keep a short row in shared memory,
and those that read parts of sectors.  Autotuning (:mod:`nostall.fusion.codegen.autotune`) may
replace the default plan by one that was measured.
"""

from __future__ import annotations

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.gpu import H200, H200_DOTS, kernel_seconds
from nostall.fusion.codegen.cost.inductor_loops import exceeds_inductor
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.cost.memory_traffic import SECTOR_BYTES
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.operations import DTYPE_BYTES

MIN_SHARED_COLUMNS = 6144
"""Columns of the shortest row for which a default plan uses shared memory.  Of 36 measured kernels
with up to 5,120 columns (train half of the generated chains, H200) none was faster so than with
its rows in registers."""


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
    """Orders kernels: :func:`is_last_choice`, modelled time, fewer rows, name."""
    plan = kernel.plan
    return is_last_choice(kernel), modelled_seconds(kernel), plan.rows, str(plan)


def is_last_choice(kernel: PlannedKernel) -> bool:
    """Whether a plan is chosen only if all others are illegal, or by a measurement."""
    is_short = kernel.schedule.column_count < MIN_SHARED_COLUMNS
    is_in_shared_memory = kernel.plan.scheme == "shared" and is_short
    return exceeds_inductor(kernel) or is_in_shared_memory or _reads_parts_of_sectors(kernel)


def _reads_parts_of_sectors(kernel: PlannedKernel) -> bool:
    """Whether rows are contiguous in memory, and a tile has fewer of them than a sector."""
    schedule = kernel.schedule
    if not schedule.is_column_major or kernel.plan.scheme == "thread":
        return False
    graph = schedule.mapping.graph
    widest = max(DTYPE_BYTES[graph[i].dtype] for i in schedule.mapping.inputs or (0,))
    return kernel.plan.rows * widest < SECTOR_BYTES


def modelled_seconds(kernel: PlannedKernel) -> float:
    """Seconds that all launches of a kernel take on an H200, *modelled*."""
    gpu = H200_DOTS if kernel.schedule.kind == "dots" else H200
    return sum(kernel_seconds(cost, gpu) for cost in kernel_costs(kernel))
