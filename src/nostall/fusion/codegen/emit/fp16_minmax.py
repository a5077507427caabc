"""Running maxima and minima of what is fp16 in memory: kept as fp16, which is exact.

The result is one of the values, and hardware compares two of 16 bits at a time.  So it does with
bf16, but Triton 3.6 compares that in fp32.
"""

from __future__ import annotations

from dataclasses import replace

from nostall.fusion.codegen.expressions.templates import Reduction, make_reduction
from nostall.fusion.codegen.loops.schedule import Schedule


def accumulator(schedule: Schedule, index: int) -> Reduction:
    """How a walk over columns keeps the running value of a reduction."""
    mapping, graph = schedule.mapping, schedule.mapping.graph
    how = make_reduction(graph[index])
    if graph[index].op not in ("amax", "amin"):
        return how
    (operand,) = mapping.operands[index]
    while operand.source in mapping.operands and graph[operand.source].op == "cast":
        if graph[operand.source].dtype != "float32":
            return how
        (operand,) = mapping.operands[operand.source]
    is_narrow = mapping.is_in_memory(operand) and graph[operand.source].dtype == "float16"
    return replace(how, dtype="float16") if is_narrow else how
