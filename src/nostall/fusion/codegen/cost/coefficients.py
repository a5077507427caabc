"""Fitted coefficients of the cost model, and modelled instructions of single operators.

Nothing is compiled: the figures were counted in code that Triton and ptxas made for sm_90.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from nostall.fusion.codegen.expressions.peephole import is_deferred_round, is_deferred_term
from nostall.fusion.codegen.expressions.softmax import EXP, NORMALIZE, softmax_template
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.graph.operations import COMPARISONS

OPERATOR_INSTRUCTIONS: Mapping[str, float] = {
    "copy": 0,
    "exp": 5,
    "exp2": 2,
    "sqrt": 15,
    "reciprocal": 8,
    "div": 8,
    "sigmoid": 4,
    "tanh": 11,
    "1 + tanh": 4,
    "1 + erf": 11,
    "share": 2,
    "sign": 4,
    "log": 25,
    "log2": 27,
    "expm1": 25,
    "log1p": 29,
    "erf": 17,
    "sin": 40,
    "cos": 40,
    "random": 52,
    "fmod": 68,
    "remainder": 70,
    "pow": 96,
}
"""Instructions of an operator for each fp32 element; 1 for operators that are not in the table.

Counted in kernels of one operator. ``sin`` and ``cos``: without the path for large numbers.
``random``: of one Philox counter, which several elements may share. ``share``: the exp of a
softmax.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCoefficients:
    """Instructions of a warp besides those of operators, and registers of a thread.

    Fitted to what Triton 3.6 compiled for sm_90, by
    ``python -m benchmarks run fusion.cost_model_fit``. In
    ``benchmarks/fusion/results/cost_model.json.gz``, measured later, the modelled instructions are
    within 14 % for half of 544 kernels without loops, and the modelled registers for half of 1,201
    kernels that do not spill. No kernel there uses ``int64_registers``, which is an earlier fit.
    """

    # Instructions of a warp
    program: float = 0.48  # once in each program
    chunk: float = 20.8  # addresses of a chunk of columns
    iteration: float = 0.47  # each further equal chunk or loop iteration; assumed, not counted
    access: float = 5.1  # each load or store of a thread
    cross_warp: float = 18.9  # each reduction of a row by several warps
    layout_conversion: float = 1.7  # each element that changes its thread layout
    # Registers of a thread
    base_registers: float = 15.3
    extra_chunk_registers: float = 5.7  # each further chunk, if chunks are not equal
    element_registers: float = 0.63  # each element of the tile
    row_operand_registers: float = 0.39  # each element and input that has rows
    broadcast_operand_registers: float = 0.34  # each element and input that all rows share
    philox_registers: float = 3.6  # each Philox counter of an element
    int64_registers: float = 2.8  # each element, if an operator reads 64-bit integers
    row_loop_registers: float = 3.0  # each element, in loops over rows (their next loads)
    peeling_registers: float = 21.8  # if rows are unaligned
    async_copy_registers: float = 14.4  # if several loops copy iterations in advance
    live_share: float = 0.53  # share of the values of small dots that are live at once
    operators: Mapping[str, float] = field(default_factory=lambda: OPERATOR_INSTRUCTIONS)


COEFFICIENTS = CostCoefficients()


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
