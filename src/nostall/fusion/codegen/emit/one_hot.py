"""Sums that have one value of a row at most: the one at the column whose number the row knows.

``gather`` of one element is such a sum, of ``where(column == number, value, 0)``.  A walk over
columns takes the value as it is; nothing is added.
"""

from __future__ import annotations

from nostall.fusion.codegen.expressions.templates import constant_value
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule

_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def one_hot_operands(schedule: Schedule, index: int) -> tuple[Operand, Operand] | None:
    """Which column a sum has and what it has of it, as operands of the ``where`` that it reads;
    None of other reductions."""
    mapping, graph = schedule.mapping, schedule.mapping.graph
    chosen = mapping.operands[index][0].source
    if graph[index].op != "sum" or chosen not in mapping.operands or graph[chosen].op != "where":
        return None
    condition, value, other = mapping.operands[chosen]
    is_zero = (
        graph[other.source].kind == "constant" and constant_value(graph[other.source]).number == 0
    )
    return (condition, value) if is_zero and is_one_hot(schedule, condition.source) else None


def is_one_hot(schedule: Schedule, index: int) -> bool:
    """Whether a condition compares the number of each column with one that a row has."""
    mapping, graph = schedule.mapping, schedule.mapping.graph
    if graph[index].op != "eq" or index not in mapping.operands:
        return False
    counters = [o for o in mapping.operands[index] if graph[o.source].op == "iota"]
    others = [o for o in mapping.operands[index] if graph[o.source].op != "iota"]
    # A counter of fewer bits may begin again.
    numbered = [
        loops_used(one.accesses) == frozenset(schedule.columns)
        and graph[one.source].dtype in ("int32", "int64")
        for one in counters
    ]
    # As floats two columns beyond 2^24 would be equal.
    whole = all(graph[one.source].dtype in _INTEGERS for one in others)
    return numbered == [True] and whole and not any(map(schedule.operand_has_columns, others))
