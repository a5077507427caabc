"""Detection of one-hot reductions: of rows in which all elements but one are neutral.

``gather`` of one element is captured as a maximum of ``where(column == number, value, -inf)``. A
loop over columns selects the value and compares nothing.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.expressions.templates import constant_value
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.graph.graph import Node

_LOWEST = {"int64": -(2**63), "int32": -(2**31), "int16": -(2**15), "int8": -(2**7), "uint8": 0}
_INTEGERS = tuple(_LOWEST)


def one_hot_operands(schedule: Schedule, index: int) -> tuple[Operand, Operand] | None:
    """Operands of a reduction of ``where(condition, value, neutral)`` with at most one true
    condition a row.

    Returns (condition, value), or None for other reductions.
    """
    mapping, graph = schedule.mapping, schedule.mapping.graph
    source = mapping.operands[index][0].source
    if source not in mapping.operands or graph[source].op != "where":
        return None
    condition, value, other = mapping.operands[source]
    is_neutral = _is_neutral(graph[index], graph[other.source])
    return (condition, value) if is_neutral and is_one_hot(schedule, condition.source) else None


def _is_neutral(reduction: Node, other: Node) -> bool:
    """Whether a value is a constant that does not change the result of a reduction."""
    if other.op != "constant":
        return False
    number = constant_value(other).number
    if reduction.op == "amax":
        return number == (-math.inf if "float" in reduction.dtype else _LOWEST[reduction.dtype])
    return reduction.op == "sum" and number == 0


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
