"""Accumulation of maxima and minima of fp16 tensors in fp16.

This is exact because the result is one of the values, and faster because hardware compares two fp16
values in one instruction. The hardware also does so with bf16, but Triton 3.6 compares bf16 in
fp32.
"""

from __future__ import annotations

from dataclasses import replace

from nostall.fusion.codegen.expressions.reductions import Reduction, make_reduction
from nostall.fusion.codegen.loops.schedule import Schedule


def accumulator(schedule: Schedule, index: int) -> Reduction:
    """The reduction, with the dtype in which a loop over columns accumulates it."""
    mapping, graph = schedule.mapping, schedule.mapping.graph
    reduction = make_reduction(graph[index])
    if graph[index].op not in ("amax", "amin"):
        return reduction
    (operand,) = mapping.operands[index]
    while operand.source in mapping.operands and graph[operand.source].op == "cast":
        if graph[operand.source].dtype != "float32":
            return reduction
        (operand,) = mapping.operands[operand.source]
    is_fp16 = mapping.is_in_memory(operand) and graph[operand.source].dtype == "float16"
    return replace(reduction, dtype="float16") if is_fp16 else reduction
