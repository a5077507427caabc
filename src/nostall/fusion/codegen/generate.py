"""Whether a set of operators can be generated as one kernel: what explorers ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.packed import (
    common_warps,
    emit_packed,
    independent_parts,
    packed_plan,
)
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.loops.dynamic_rows import check_dynamic_size
from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule, build_schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, first_illegal_reason
from nostall.fusion.graph.graph import Graph

PlanChooser = Callable[[Schedule], KernelPlan]


def schedule_operators(graph: Graph, operators: Iterable[int]) -> Schedule:
    """Rows and columns for a set of operators; :class:`BadFusion` where they have no common ones
    (then they may still be packed)."""
    found = build_schedule(map_pattern(graph, operators))
    check_dynamic_size(found)
    return found


def generate(graph: Graph, operators: Iterable[int], choice: PlanChooser = default_plan) -> Program:
    """The kernel of a set of operators: over common loops by the plan that ``choice`` takes, or as
    a pack of its parts.  Raises :class:`BadFusion` where it is neither."""
    chosen = tuple(operators)
    try:
        schedule = schedule_operators(graph, chosen)
        return emit(schedule, choice(schedule))
    except BadInput:
        parts = independent_parts(graph, chosen)
        if len(parts) < 2:
            raise
    every = [schedule_operators(graph, part) for part in parts]
    return emit_packed(every, packed_plan(every))


def no_kernel_reason(graph: Graph, operators: Iterable[int]) -> str | None:
    """Why :func:`generate` has no kernel for these operators; None where it has one."""
    chosen = tuple(operators)
    reason = _no_common_kernel_reason(graph, chosen)
    if reason is None:
        return None
    parts = independent_parts(graph, chosen)
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
    """Whether there is no kernel for an operator alone, and so none with others."""
    try:
        map_pattern(graph, (index,))
    except BadInput:
        return True
    return False
