"""Symbolic execution of a block with uninterpreted functions and hash-consed terms.

The value of a register is a number: that of the evaluation that wrote it and its position among the
results, or one of its own for the value at the start of the block.  An evaluation is an instruction
with the values that it reads, and equal evaluations have equal numbers.  Pseudo registers hold
memory, effects and convergence, so that they are compared as registers are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nostall.ptx.safety.reading.instruction import Instruction

_MAX_RESULTS = 1 << 12
"""More than an instruction writes: 256 registers and the pseudo registers."""

Evaluation = tuple[int, ...]
"""The number of an instruction, then the value of each register that it reads."""


@dataclass(slots=True)
class Execution:
    """The execution of one block of the original."""

    initial: dict[int, int]
    """Register -> value at the start of the block, of the registers that the block touches."""
    numbers: dict[Evaluation, int] = field(default_factory=dict[Evaluation, int])
    """Each evaluation of the block -> its number."""
    order: list[int] = field(default_factory=list[int])
    """Numbers of the evaluations, sorted."""
    final: dict[int, int] = field(default_factory=dict[int, int])
    """Register -> value at the end of the block."""
    instructions: list[int] = field(default_factory=list[int])
    """Numbers of the block's instructions, sorted."""


class Machine:
    """Executes blocks of one function; ``reads`` and ``writes`` are by instruction number."""

    def __init__(
        self, reads: Mapping[int, tuple[int, ...]], writes: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.reads = reads
        self.writes = writes

    def execute(self, instructions: Sequence[Instruction]) -> Execution:
        """Execute a block of the original."""
        used = [i.number for i in instructions]
        touched = {r for n in used for r in (*self.reads[n], *self.writes[n])}
        # Values of evaluations are not negative.
        execution = Execution({register: -1 - register for register in touched})
        values, numbers = dict(execution.initial), execution.numbers
        for which in used:
            number = numbers.setdefault(self.evaluation(which, values), len(numbers))
            self._write(which, number, values)
            execution.order.append(number)
        execution.order.sort()
        execution.final = values
        execution.instructions = sorted(used)
        return execution

    def follow(self, instructions: Sequence[Instruction], original: Execution) -> int | None:
        """Execute a block of a candidate beside the original's.

        Returns None if the block computes the same, the position of the first instruction that
        reads other values than in the original, or the number of instructions if the values at the
        end differ.  The block must have the original's instructions.
        """
        values = dict(original.initial)
        value_of = values.__getitem__
        number_of = original.numbers.get
        all_reads, all_writes = self.reads, self.writes
        order: list[int] = []
        for position, instruction in enumerate(instructions):
            which = instruction.number
            number = number_of((which, *map(value_of, all_reads[which])))
            if number is None:
                return position
            value = number * _MAX_RESULTS
            for register in all_writes[which]:
                values[register] = value
                value += 1
            order.append(number)
        order.sort()
        is_equal = order == original.order and values == original.final
        return None if is_equal else len(instructions)

    def evaluation(self, which: int, values: Mapping[int, int]) -> Evaluation:
        """The evaluation of instruction number ``which`` with these values."""
        return (which, *[values[r] for r in self.reads[which]])

    def values_before(
        self, instructions: Sequence[Instruction], position: int, original: Execution
    ) -> dict[int, int]:
        """Values before an instruction of a candidate; all before it read the original's values."""
        values = dict(original.initial)
        for instruction in instructions[:position]:
            number = original.numbers[self.evaluation(instruction.number, values)]
            self._write(instruction.number, number, values)
        return values

    def _write(self, which: int, number: int, values: dict[int, int]) -> None:
        for position, register in enumerate(self.writes[which]):
            values[register] = number * _MAX_RESULTS + position
