"""Detection of one-hot sums: sums over a row with at most one nonzero term.

``gather`` of one element is captured as such a sum, of ``where(column == number, value, 0)``. A
loop over columns selects the value and adds nothing.
"""

from __future__ import annotations

from nostall.fusion.codegen.expressions.templates import constant_value
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule

_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def one_hot_operands(schedule: Schedule, index: int) -> tuple[Operand, Operand] | None:
    """Operands of a sum of ``where(condition, value, 0)`` with one true condition per row at most.

    Returns (condition, value), or None for other reductions.
    """
    mapping, graph = schedule.mapping, schedule.mapping.graph
    source = mapping.operands[index][0].source
    if graph[index].op != "sum" or source not in mapping.operands or graph[source].op != "where":
        return None
    condition, value, other = mapping.operands[source]
    is_zero = (
        graph[other.source].kind == "constant" and constant_value(graph[other.source]).number == 0
    )
    return (condition, value) if is_zero and is_one_hot(schedule, condition.source) else None


def is_one_hot(schedule: Schedule, index: int) -> bool:
    """Whether an operator compares each column number with an integer that a row has once."""
    mapping, graph = schedule.mapping, schedule.mapping.graph
    if graph[index].op != "eq" or index not in mapping.operands:
        return False
    counters = [o for o in mapping.operands[index] if graph[o.source].op == "iota"]
    others = [o for o in mapping.operands[index] if graph[o.source].op != "iota"]
    # Narrower counters may wrap around.
    are_column_numbers = [
        loops_used(operand.accesses) == frozenset(schedule.columns)
        and graph[operand.source].dtype in ("int32", "int64")
        for operand in counters
    ]
    # fp32 cannot distinguish column numbers above 2^24.
    are_integers = all(graph[operand.source].dtype in _INTEGERS for operand in others)
    has_columns = any(map(schedule.operand_has_columns, others))
    return are_column_numbers == [True] and are_integers and not has_columns
