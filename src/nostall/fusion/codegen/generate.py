"""Whether a set of operators can be generated as one kernel: what explorers ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nostall.core.errors import BadInput
from nostall.fusion.codegen.cost.default_plan import first_choice
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.packed import common_warps, emit_packed, packed_plan, pieces
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.loops.dynamic_rows import check_varying
from nostall.fusion.codegen.loops.mapping import map_pattern
from nostall.fusion.codegen.loops.schedule import Schedule, schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, first_refusal
from nostall.fusion.graph.graph import Graph

Choice = Callable[[Schedule], KernelPlan]


def scheduled(graph: Graph, operators: Iterable[int]) -> Schedule:
    """Rows and columns for a set of operators; :class:`BadFusion` where they have no common ones
    (then they may still be packed)."""
    found = schedule(map_pattern(graph, operators))
    check_varying(found)
    return found


def generate(graph: Graph, operators: Iterable[int], choice: Choice = first_choice) -> Program:
    """The kernel of a set of operators: over common loops by the plan that ``choice`` takes, or as
    a pack of its parts.  Raises :class:`BadFusion` where it is neither."""
    chosen = tuple(operators)
    try:
        of = scheduled(graph, chosen)
        return emit(of, choice(of))
    except BadInput:
        parts = pieces(graph, chosen)
        if len(parts) < 2:
            raise
    every = [scheduled(graph, part) for part in parts]
    return emit_packed(every, packed_plan(every))


def refused(graph: Graph, operators: Iterable[int]) -> str | None:
    """Why :func:`generate` has no kernel for these operators; None where it has one."""
    chosen = tuple(operators)
    reason = _refused(graph, chosen)
    if reason is None:
        return None
    parts = pieces(graph, chosen)
    if len(parts) < 2:
        return reason
    try:
        warps = common_warps(scheduled(graph, part) for part in parts)
    except BadInput as error:
        return str(error)
    return None if warps else reason


def _refused(graph: Graph, operators: tuple[int, ...]) -> str | None:
    try:
        return first_refusal(scheduled(graph, operators))
    except BadInput as error:
        return str(error)


def untemplated(graph: Graph, index: int) -> bool:
    """Whether there is no kernel for an operator alone, and so none with others."""
    try:
        map_pattern(graph, (index,))
    except BadInput:
        return True
    return False
