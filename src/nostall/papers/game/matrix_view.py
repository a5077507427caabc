"""CuAsmRL's observation: a matrix with one row per instruction, in the current order.

Columns: the six wait slots (their number, or -1), read and write scoreboard (-1: none), yield,
stall, guarded or not, number of the memory opcode (-1: all others), and the operands, destination
first. An operand is a number in [0, 1] by its first appearance; rows are padded with -1.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.papers.game.actions import CUASMRL_OPCODES
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.arrays import Int32Array, UInt8Array

Float32Array = NDArray[np.float32]

_CONTROL_COLUMNS = 10
LOW, HIGH = -1.0, 16.0
"""Bounds of all entries."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def _fill_rows(
    rows: Float32Array,
    static: Float32Array,
    order: Int32Array,
    stall: UInt8Array,
    yields: UInt8Array,
    write_sb: UInt8Array,
    read_sb: UInt8Array,
    wait: UInt8Array,
    reuse: UInt8Array,
) -> None:
    """Fill one row per position: control fields, then the columns that no move changes."""
    for p in range(len(order)):
        i = order[p]
        for slot in range(6):
            rows[p, slot] = slot if wait[i] >> slot & 1 else -1
        rows[p, 6] = read_sb[i] if read_sb[i] < 6 else -1
        rows[p, 7] = write_sb[i] if write_sb[i] < 6 else -1
        rows[p, 8] = yields[i]
        rows[p, 9] = stall[i]
        for column in range(static.shape[1]):
            rows[p, _CONTROL_COLUMNS + column] = static[i, column]


class MatrixView:
    """Observes the schedules of one kernel as matrices."""

    def __init__(self, function: Function) -> None:
        instructions = sorted(function.instructions, key=lambda i: i.index)
        operands = [_operands(i) for i in instructions]
        numbers: dict[str, int] = {}
        for row in operands:
            for operand in row:
                numbers.setdefault(operand, len(numbers))
        sources = max([len(row) - 1 for row in operands], default=0)
        self.shape = (1, len(instructions), _CONTROL_COLUMNS + 3 + max(0, sources))
        """(1, instructions, columns): an image with one channel."""
        static_shape = (self.shape[1], self.shape[2] - _CONTROL_COLUMNS)
        self._static = np.full(static_shape, -1.0, dtype=np.float32)
        for instruction, row in zip(instructions, operands, strict=True):
            values = [float(instruction.is_guarded), _opcode_number(instruction)]
            values += [numbers[operand] / len(numbers) for operand in row]
            self._static[instruction.index, : len(values)] = values

    def observe(self, state: Schedule) -> Float32Array:
        """The matrix of ``state``, float32 of ``shape``."""
        matrix = np.empty(self.shape, dtype=np.float32)
        _fill_rows(matrix[0], self._static, *state.arrays())
        return matrix


def _operands(instruction: Instruction) -> tuple[str, ...]:
    return tuple(operand.replace(".reuse", "") for operand in instruction.operands)


def _opcode_number(instruction: Instruction) -> float:
    base = instruction.base
    if base in CUASMRL_OPCODES and not instruction.is_barrier:
        return float(CUASMRL_OPCODES.index(base))
    return -1.0
