"""Whether a set of operators can be generated as one kernel: what explorers ask."""

from __future__ import annotations

from collections.abc import Iterable

from nostall.core.errors import BadInput
from nostall.fusion.codegen.mapping import map_pattern
from nostall.fusion.codegen.plan import first_refusal
from nostall.fusion.codegen.row_count import check_varying
from nostall.fusion.codegen.schedule import Schedule, schedule
from nostall.fusion.graph import Graph


def scheduled(graph: Graph, operators: Iterable[int]) -> Schedule:
    """Rows and columns for a set of operators; :class:`BadFusion` where it is no kernel."""
    found = schedule(map_pattern(graph, operators))
    check_varying(found)
    return found


def refused(graph: Graph, operators: Iterable[int]) -> str | None:
    """Why there is no kernel of these operators; None where there is one."""
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
