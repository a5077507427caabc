"""Plan variants that only autotuning considers: the cost model cannot predict what they gain."""

from __future__ import annotations

from collections.abc import Iterator

from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import Scheme
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE, next_power_of_two

MAX_WARPS = 32
VECTOR_ELEMENTS = 8
"""Two-byte elements of one 16-byte load."""


def with_eager_loads(kernel: PlannedKernel) -> PlannedKernel | None:
    """The kernel with operands that all rows share loaded eagerly; None if that is illegal.

    No warp waits for these loads after a reduction then, but they take registers. A kernel without
    reductions loads all of its inputs before it computes anything.
    """
    return kernel.variant(eager_loads=True)


def with_evict_first(kernel: PlannedKernel) -> PlannedKernel | None:
    """The kernel with outputs larger than L2 stored as ``evict_first``; None if that is illegal.

    The next kernel that reads such an output from its start finds that part evicted otherwise. What
    a kernel gained alone, it also gained together with its reader (docs/explanation/codegen.md).
    """
    return kernel.variant(evict_first=True)


def single_chunk_kernels(kernel: PlannedKernel) -> tuple[PlannedKernel, ...]:
    """The kernel with each row in one chunk: 8 columns of a row for each thread, and 16.

    Nearly half of the lanes may be masked, so :func:`plans` rejects these plans. That costs nothing
    if memory is the bottleneck, and a thread waits for one or two loads of each input only. Empty
    if rows are in one chunk already, or not in registers, or if the plans are illegal.
    """
    plan = kernel.plan
    if plan.scheme not in ("warp", "block") or len(plan.chunks) == 1:
        return ()
    width = next_power_of_two(kernel.schedule.column_count)
    variants = []
    for elements in (VECTOR_ELEMENTS, 2 * VECTOR_ELEMENTS):
        warps = min(MAX_WARPS, max(1, plan.rows * width // (elements * WARP_SIZE)))
        scheme: Scheme = "warp" if plan.rows >= warps else "block"
        variants.append(kernel.variant(scheme=scheme, chunks=(width,), num_warps=warps))
    return tuple(dict.fromkeys(variant for variant in variants if variant is not None))


def plans_with_variants(schedule: Schedule) -> Iterator[PlannedKernel]:
    """All legal plans of a schedule and all of their variants."""
    legal = plans(schedule).legal
    single_chunk = [variant for kernel in legal for variant in single_chunk_kernels(kernel)]
    for kernel in (*legal, *dict.fromkeys(single_chunk)):
        for variant in (kernel, with_eager_loads(kernel)):
            if variant is not None:
                yield variant
                if (evicting := with_evict_first(variant)) is not None:
                    yield evicting
