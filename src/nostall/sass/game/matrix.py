"""CuAsmRL's observation: a table with one row per instruction, in the present order.

Columns: the six wait slots (their number, or -1), read and write scoreboard (-1: none), yield,
stall, guarded or not, number of the memory mnemonic (-1: all others), and the operands as numbers
in [0, 1] in order of first appearance: destination, then sources, filled up with -1.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.game.actions import PUBLISHED
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.state import Bytes

Floats = NDArray[np.float32]

_CONTROL = 10
LOW, HIGH = -1.0, 16.0
"""Bounds of all entries."""


@njit(cache=True)  # type: ignore[untyped-decorator]
def _fill(
    rows: Floats,
    fixed: Floats,
    order: NDArray[np.int32],
    stall: Bytes,
    yields: Bytes,
    write_sb: Bytes,
    read_sb: Bytes,
    wait: Bytes,
    reuse: Bytes,
) -> None:
    """One row per position: control fields, then the part that never changes."""
    for p in range(len(order)):
        i = order[p]
        for slot in range(6):
            rows[p, slot] = slot if wait[i] >> slot & 1 else -1
        rows[p, 6] = read_sb[i] if read_sb[i] < 6 else -1
        rows[p, 7] = write_sb[i] if write_sb[i] < 6 else -1
        rows[p, 8] = yields[i]
        rows[p, 9] = stall[i]
        for column in range(fixed.shape[1]):
            rows[p, _CONTROL + column] = fixed[i, column]


class Matrix:
    """The table of one kernel.  ``shape`` is (1, instructions, columns), as a picture."""

    def __init__(self, function: Function) -> None:
        instructions = sorted(function.instructions, key=lambda i: i.index)
        operands = [_operands(i) for i in instructions]
        names: dict[str, int] = {}
        for row in operands:
            for name in row:
                names.setdefault(name, len(names))
        sources = max([len(row) - 1 for row in operands], default=0)
        self.shape = (1, len(instructions), _CONTROL + 3 + max(0, sources))
        self._fixed = np.full((self.shape[1], self.shape[2] - _CONTROL), -1.0, dtype=np.float32)
        for instruction, row in zip(instructions, operands, strict=True):
            values = [float(instruction.is_guarded), _memory_number(instruction)]
            values += [names[name] / len(names) for name in row]
            self._fixed[instruction.index, : len(values)] = values

    def of(self, state: Schedule) -> NDArray[np.float32]:
        """The table of ``state``, float32 ``shape``."""
        table = np.empty(self.shape, dtype=np.float32)
        _fill(table[0], self._fixed, *state.arrays())
        return table


def _operands(instruction: Instruction) -> tuple[str, ...]:
    return tuple(operand.replace(".reuse", "") for operand in instruction.operands)


def _memory_number(instruction: Instruction) -> float:
    base = instruction.base
    return (
        float(PUBLISHED.index(base)) if base in PUBLISHED and not instruction.is_barrier else -1.0
    )
