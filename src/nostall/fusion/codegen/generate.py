"""Generation of a kernel for a set of operators, and the reasons why some sets have none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.packed import emit_packed
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.loops.dynamic_rows import check_dynamic_size
from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule, build_schedule
from nostall.fusion.codegen.packing import common_warps, independent_parts, plan_packed
from nostall.fusion.codegen.tiling.plan_space import first_illegal_reason
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.graph.graph import Graph

PlanChooser = Callable[[Schedule], PlannedKernel]
"""Chooses the plan of a schedule. Raises :class:`BadInput` if no plan is legal."""


def schedule_operators(graph: Graph, operators: Iterable[int]) -> Schedule:
    """The schedule (rows and columns) of a set of operators.

    Raises :class:`BadFusion` if the operators have no common loops; :func:`generate` may still pack
    them.
    """
    schedule = build_schedule(map_pattern(graph, operators))
    check_dynamic_size(schedule)
    return schedule


def generate(graph: Graph, operators: Iterable[int], choice: PlanChooser = default_plan) -> Program:
    """The kernel of a set of operators.

    It has common loops, with the plan that ``choice`` returns; if there are none, it is a packed
    kernel of the independent parts. Raises :class:`BadFusion` if neither is possible.
    """
    pattern = tuple(operators)
    try:
        return emit(choice(schedule_operators(graph, pattern)))
    except BadInput:
        parts = independent_parts(graph, pattern)
        if len(parts) < 2:
            raise
    return emit_packed(plan_packed([schedule_operators(graph, part) for part in parts]))


def no_kernel_reason(graph: Graph, operators: Iterable[int]) -> str | None:
    """Why :func:`generate` has no kernel for these operators; None if it has one."""
    pattern = tuple(operators)
    reason = _no_common_kernel_reason(graph, pattern)
    if reason is None:
        return None
    parts = independent_parts(graph, pattern)
    if len(parts) < 2:
        return reason
    try:
        warps = common_warps(schedule_operators(graph, part) for part in parts)
    except BadInput as error:
        return str(error)
    return None if warps else reason


def _no_common_kernel_reason(graph: Graph, operators: tuple[int, ...]) -> str | None:
    try:
        return first_illegal_reason(schedule_operators(graph, operators))
    except BadInput as error:
        return str(error)


def has_no_template(graph: Graph, index: int) -> bool:
    """Whether there is no kernel for a single operator, and therefore none that contains it."""
    try:
        map_pattern(graph, (index,))
    except BadInput:
        return True
    return False
