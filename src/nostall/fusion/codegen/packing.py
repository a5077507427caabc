"""Kernel packing: which patterns can share a launch without sharing loops, and by which plans.

Remote fusion of arXiv:2009.10924: the patterns exchange no data, so their shapes need not agree.
:mod:`nostall.fusion.codegen.emit.packed` writes the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.emit import PACKABLE_BODIES
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph


def independent_parts(graph: Graph, operators: Iterable[int]) -> list[tuple[int, ...]]:
    """Partition operators into parts that neither exchange data nor read a common tensor."""
    parts: list[tuple[set[int], set[int]]] = []
    for index in sorted(operators):
        tensors = {index, *graph.sources[index]}
        connected = [part for part in parts if part[1] & tensors]
        separate = [part for part in parts if not part[1] & tensors]
        members = {index}.union(*(part for part, _ in connected))
        touched = tensors.union(*(sources for _, sources in connected))
        parts = [*separate, (members, touched)]
    return sorted(tuple(sorted(members)) for members, _ in parts)


def common_warps(schedules: Iterable[Schedule]) -> set[int]:
    """Numbers of warps with which each of the schedules has a plan that can be packed."""
    return set.intersection(
        *({kernel.plan.num_warps for kernel in _packable(schedule)} for schedule in schedules)
    )


def plan_packed(schedules: Sequence[Schedule]) -> tuple[PlannedKernel, ...]:
    """The kernels with the smallest sum of modelled times among those of equal numbers of warps.

    Raises :class:`BadFusion` if there is no common number of warps.
    """
    warps = common_warps(schedules)
    if not warps:
        raise BadFusion(
            f"{len(schedules)} parts have no single kernel with the same number of warps; make "
            "them separate kernels"
        )
    choices = [
        [_fastest_kernel(schedule, count) for schedule in schedules] for count in sorted(warps)
    ]
    fastest = min(choices, key=lambda ranked: sum(seconds for seconds, _, _ in ranked))
    return tuple(kernel for _, _, kernel in fastest)


def _packable(schedule: Schedule) -> Iterable[PlannedKernel]:
    return (kernel for kernel in plans(schedule).legal if kernel.plan.scheme in PACKABLE_BODIES)


def _fastest_kernel(schedule: Schedule, warps: int) -> tuple[float, str, PlannedKernel]:
    """The packable kernel with ``warps`` warps and the least modelled time, with its sort key."""
    ranked = (
        (modelled_seconds(kernel), str(kernel.plan), kernel)
        for kernel in _packable(schedule)
        if kernel.plan.num_warps == warps
    )
    return min(ranked, key=lambda entry: entry[:2])
