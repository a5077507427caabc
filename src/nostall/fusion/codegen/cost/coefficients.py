"""Fitted coefficients of the cost model, and instructions of each operator.

Nothing is compiled: the figures were counted in code that Triton and ptxas made for sm_90.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
