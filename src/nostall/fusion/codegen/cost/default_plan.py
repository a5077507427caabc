"""The default plan of a schedule: the legal plan with the least modelled time.

Three kinds of plans come last, because the model is not exact enough to choose them: those that
read a row more often than Inductor's kernel or in shorter iterations
(:mod:`~nostall.fusion.codegen.cost.default_plan`), those that keep a short row in shared memory,
and those that read parts of sectors.  Autotuning (:mod:`nostall.fusion.codegen.autotune`) may
replace the default plan by one that was measured.

How Inductor's kernel loops over a row: a bound for the plans that are chosen without measuring.

Inductor (torch 2.11 to 2.13, ``torch._inductor.choices`` and ``triton_heuristics``) keeps a
contiguous row of at most 1,024 elements in registers.  Longer rows are read once for each level of
reductions and once for the results, 2,048 elements in an iteration; the statistics of an online
softmax and those of a variance share a level.  A default plan reads a row at most as often, and its
loops have at most as many iterations.  Autotuning may choose other plans, because it measures them.
"""

from __future__ import annotations

from functools import lru_cache

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.gpu import H200, H200_DOTS, SECTOR_BYTES, kernel_seconds
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.loops.mapping import loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, kernel_facts
from nostall.fusion.graph.operations import DTYPE_BYTES

PERSISTENT_COLUMNS = 1024
"""Elements of the longest row that Inductor keeps in registers."""
LOOP_COLUMNS = 2048
"""Elements of a row in an iteration of Inductor's loops."""
SPLIT_ELEMENTS = 512
"""Elements of an iteration of Inductor's programs that share a row."""
_LOOPING_SCHEMES = ("looped", "split")


def inductor_row_reads(schedule: Schedule) -> int:
    """How often Inductor's kernel reads a row."""
    if schedule.column_count <= PERSISTENT_COLUMNS:
        return 1
    return loop_row_reads(schedule)


def loop_row_reads(schedule: Schedule) -> int:
    """How many passes of a kernel without a row on chip read a tensor along rows and columns."""
    rows, columns = set(schedule.rows), set(schedule.columns)
    mapping = schedule.mapping
    reads: dict[object, int] = {}
    all_passes = kernel_facts(schedule).passes
    for part in all_passes:
        for operand in part.operands:
            used = frozenset() if isinstance(operand, int) else loops_used(operand.accesses)
            if used & rows and used & columns:
                reads[operand] = reads.get(operand, 0) + 1
    # A tensor of one row has no row loop: count what varies along the columns.
    if not reads and mapping.memory_operands:
        return sum(part.has_columns for part in all_passes)
    return max(reads.values(), default=1)


def exceeds_inductor(kernel: PlannedKernel) -> bool:
    """Whether a plan reads rows more often than Inductor's kernel, or in shorter iterations."""
    schedule, plan = kernel.schedule, kernel.plan
    if plan.scheme not in _LOOPING_SCHEMES or schedule.is_column_major:
        return False
    return loop_row_reads(schedule) > inductor_row_reads(schedule) or _has_short_iterations(
        schedule, plan
    )


def _has_short_iterations(schedule: Schedule, plan: KernelPlan) -> bool:
    """Whether an iteration has fewer elements than Inductor's, and the row has more.

    Programs that share a row (``split``) may have a quarter, because more of them are resident.
    """
    if plan.scheme == "split":
        return plan.rows * plan.chunks[0] < min(SPLIT_ELEMENTS, schedule.column_count)
    return plan.chunks[0] < min(LOOP_COLUMNS, schedule.column_count)


MIN_SHARED_COLUMNS = 6144
"""Columns of the shortest row for which a default plan uses shared memory.  Of 36 measured kernels
with up to 5,120 columns (train half of the generated chains, H200) none was faster so than with
its rows in registers."""


@lru_cache(maxsize=64)
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


@lru_cache(maxsize=4096)
def modelled_seconds(kernel: PlannedKernel) -> float:
    """Seconds that all launches of a kernel take on an H200, *modelled*."""
    gpu = H200_DOTS if kernel.schedule.kind == "dots" else H200
    return sum(kernel_seconds(cost, gpu) for cost in kernel_costs(kernel))
