"""Candidates of autotuning: which planned kernels to measure, and which one the samples select."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from nostall.core.measurement import Comparison, Kind
from nostall.fusion.codegen.cost.default_plan import (
    default_plan,
    is_last_choice,
    modelled_seconds,
)
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, Scheme
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE, next_power_of_two

MAX_SLOWDOWN = 1.5
"""Plans whose modelled time is more than this many times the shortest one are not measured.  At
1.2, one of 39 measured kernels would lose 32 % (attention pooling, benchmarks/fusion/results/)."""
MIN_GAIN = 1.001
"""Smaller gains are not measured a second time."""
LAZY_CANDIDATES = 4
"""Of more candidates than this, as many as exceed it are measured with eager loads, too."""
MAX_WARPS = 32
VECTOR_ELEMENTS = 8
"""Two-byte elements of one 16-byte load."""


def candidates(schedule: Schedule, most: int) -> tuple[PlannedKernel, ...]:
    """The kernels to measure first.

    They are the :func:`fastest_modelled` ones, beginning with the default plan, and the first of
    them again :func:`with_eager_loads` if that is
    legal. Raises :class:`BadInput` if no plan is legal.
    """
    legal = plans(schedule).legal
    times = {kernel.plan: modelled_seconds(kernel) for kernel in legal}
    if not times:
        return (default_plan(schedule),)
    last = {kernel.plan for kernel in legal if is_last_choice(kernel)}
    fastest = [PlannedKernel(schedule, plan) for plan in fastest_modelled(times, most, last)]
    eager = [variant for variant in map(with_eager_loads, fastest) if variant is not None]
    return (*fastest, *eager[: max(0, most - LAZY_CANDIDATES)])


# Variants that only autotuning considers: the cost model cannot predict what they gain.


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


def neighbours(kernel: PlannedKernel) -> tuple[PlannedKernel, ...]:
    """The kernels that differ in one respect from a kernel of the same schedule.

    A respect is: half or twice the rows, warps or columns of a loop iteration; the next number of
    splits; other chunks of a row; ``async_copies``; ``eager_loads``; ``evict_first``. Variants of
    :func:`single_chunk_kernels` are neighbours, too.
    """
    near = []
    for evict_first, eager_loads in product((False, True), repeat=2):
        options: dict[str, Any] = {"evict_first": evict_first, "eager_loads": eager_loads}
        for other in plans(kernel.schedule).legal:
            if _plan_distance(kernel.plan, replace(other.plan, **options)) == 1:
                near.append(other.variant(**options))
    for single_chunk in single_chunk_kernels(kernel):
        near += [single_chunk.variant(eager_loads=eager) for eager in (False, True)]
    return tuple(dict.fromkeys(variant for variant in near if variant is not None))


def _plan_distance(first: KernelPlan, second: KernelPlan) -> int:
    """In how many respects two plans differ; 2 if they differ in one by more than one step."""
    families = {
        (_scheme_family(plan), plan.rematerialized, plan.peeled) for plan in (first, second)
    }
    if len(families) > 1:
        return 2
    # Two numbers, and the factor between neighbouring values. Few numbers of splits are tried.
    counts = [
        (first.rows, second.rows, 2),
        (first.num_warps, second.num_warps, 2),
        (first.splits, second.splits, 4),
    ]
    single_chunk = len(first.chunks) == len(second.chunks) == 1
    if single_chunk:
        counts.append((first.chunks[0], second.chunks[0], 2))
    if any(max(a, b) > step * min(a, b) for a, b, step in counts):
        return 2
    flags = (
        not single_chunk and first.chunks != second.chunks,
        first.async_copies != second.async_copies,
        first.eager_loads != second.eager_loads,
        first.evict_first != second.evict_first,
    )
    return sum(a != b for a, b, _ in counts) + sum(flags)


def _scheme_family(plan: KernelPlan) -> str:
    """The scheme. ``warp`` and ``block`` are one family: they differ in rows and warps only."""
    return "register rows" if plan.scheme in ("warp", "block") else plan.scheme


def fastest_modelled(
    times: Mapping[KernelPlan, float], most: int, last: Collection[KernelPlan] = ()
) -> tuple[KernelPlan, ...]:
    """The plan with the least modelled time of every scheme, and the ``most`` fastest of all.

    ``times``: modelled seconds of each plan; ``last``: plans that are last choices. Fastest first.
    Plans that differ in rows, warps or splits only are separate candidates, because the model ranks
    these least reliably.
    """
    ranked = sorted(times, key=lambda plan: (plan in last, times[plan], plan.rows, str(plan)))
    ranked = [plan for plan in ranked if times[plan] <= MAX_SLOWDOWN * times[ranked[0]]]
    of_schemes = {plan.scheme: plan for plan in reversed(ranked)}
    selected = {*of_schemes.values(), *ranked[:most]}
    return tuple(plan for plan in ranked if plan in selected)


def most_promising(samples: Sequence[Sequence[float]]) -> int:
    """The number of the candidate to compare with the first one alone; 0 if there is none.

    It is the candidate with the largest median gain, if that gain is at least :data:`MIN_GAIN` and
    larger than the gain of the null. ``samples`` as for :func:`fastest_measured`: with many
    candidates, each has few samples, so a longer comparison follows.
    """
    first, *others, null = samples
    gains = [median(a / b for a, b in zip(first, other, strict=True)) for other in others]
    best = max(range(len(gains)), key=gains.__getitem__)
    null_gain = median(a / b for a, b in zip(first, null, strict=True))
    return best + 1 if gains[best] > max(MIN_GAIN, null_gain) else 0


def fastest_measured(samples: Sequence[Sequence[float]], kind: Kind) -> int:
    """The number of the candidate to use: 0, the first one, unless another is faster.

    Faster means, as in all comparisons: its whole interval is above 1 and above the null.
    ``samples`` are interleaved; the last row is the first candidate a second time, the null.
    """
    first, *others, null = samples
    best, gain = 0, 1.0
    for at, other in enumerate(others, 1):
        comparison = Comparison.from_samples(first, other, null, kind=kind)
        if comparison.verdict == "faster" and comparison.ratio > gain:
            best, gain = at, comparison.ratio
    return best
