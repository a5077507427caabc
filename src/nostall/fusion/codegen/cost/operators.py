"""Modelled instructions of single operators."""

from __future__ import annotations

import math
from collections.abc import Mapping

from nostall.fusion.codegen.expressions.peephole import is_deferred_round, is_deferred_term
from nostall.fusion.codegen.expressions.softmax import EXP, NORMALIZE, softmax_template
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.graph.operations import COMPARISONS

_CAST_INSTRUCTIONS = {"float32": 0.0, "float16": 1.5, "bfloat16": 1.5}
"""Instructions of a cast to these dtypes; 2 to others."""
_INT64_INSTRUCTIONS = 4.0
"""More instructions of an operator that reads 64-bit integers: indices are widened, and two words
of each element are compared."""
_ROW_DIVISION_INSTRUCTIONS = 2.0
"""Instructions of a division by a value of the row, whose reciprocal is computed once."""


def operator_cost(
    schedule: Schedule, index: int, is_flat: bool, instructions: Mapping[str, float]
) -> float:
    """Instructions of an operator for each element; ``instructions``: those of each operator name.

    ``is_flat``: the kernel has no reductions, so that no operand is a value of the row.
    """
    graph = schedule.mapping.graph
    node = graph[index]
    if node.op == "random":
        return instructions["random"]
    if is_deferred_term(graph, index) or is_deferred_round(graph, index, schedule.mapping.outputs):
        return 0.0
    for source in graph.sources[index] if node.op == "add" else ():
        if is_deferred_term(graph, source):
            return instructions[f"1 + {graph[source].op}"]
    if (template := softmax_template(graph, index)) in (EXP, NORMALIZE):
        return instructions["share"] if template == EXP else 1.0
    if node.op == "cast":
        return _CAST_INSTRUCTIONS.get(node.dtype, 2.0)
    divisor = schedule.mapping.operands[index][-1] if node.op == "div" else None
    if divisor and not is_flat and not schedule.operand_has_columns(divisor):
        return _ROW_DIVISION_INSTRUCTIONS
    return instructions.get(node.op, 1.0) + _INT64_INSTRUCTIONS * uses_int64(schedule, index)


def uses_int64(schedule: Schedule, index: int) -> bool:
    """Whether an operator computes with 64-bit integers.

    Seeds of random numbers do not count. Counters do not either, if they are compared with values
    of the row only: these comparisons are done in 32 bits.
    """
    graph, operands = schedule.mapping.graph, schedule.mapping.operands[index]
    if graph[index].op == "random":
        return False
    int64 = [operand for operand in operands if graph[operand.source].dtype == "int64"]
    if graph[index].op in COMPARISONS:
        others = [operand for operand in int64 if graph[operand.source].op != "iota"]
        has_counter = len(others) < len(int64)
        if has_counter and not any(map(schedule.operand_has_columns, others)):
            return False
    return bool(int64)


def elements_per_philox_counter(
    schedule: Schedule, index: int, vector: int, along_rows: bool
) -> int:
    """Number of a thread's ``vector`` contiguous elements that share one Philox counter.

    ``along_rows``: contiguous elements are those of one column.
    """
    words = schedule.mapping.graph[index]["words"]
    assert isinstance(words, int)
    fastest = (schedule.rows if along_rows else schedule.columns)[-1]
    loops = [loop for access in schedule.mapping.accesses[index] for loop in access.loops]
    return math.gcd(words, vector) if loops and loops[-1] == fastest else 1
