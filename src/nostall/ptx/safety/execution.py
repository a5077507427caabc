"""Symbolic execution of a block with uninterpreted functions and hash-consed terms.

The value of a register is a number: that of the evaluation that wrote it and its position among the
results, or one of its own for the value at the start of the block.  An evaluation is an instruction
with the values that it reads, and equal evaluations have equal numbers.  Pseudo registers hold
memory, effects and convergence, so that they are compared as registers are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nostall.ptx.safety.instruction import Instruction

_MAX_RESULTS = 1 << 12
"""More than an instruction writes: 256 registers and the pseudo registers."""
_UNEQUAL = -1

Evaluation = tuple[int, ...]
"""The number of an instruction, then the value of each register that it reads."""


@dataclass(slots=True)
class Execution:
    """The execution of one block of the original."""

    numbers: dict[Evaluation, int] = field(default_factory=dict[Evaluation, int])
    """Each evaluation of the block -> its number."""
    order: list[int] = field(default_factory=list[int])
    """Numbers of the evaluations, sorted."""
    final: dict[int, int] = field(default_factory=dict[int, int])
    """Register -> value at the end of the block, of the registers that the block writes."""
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
        execution = Execution()
        values, numbers = execution.final, execution.numbers
        for instruction in instructions:
            number = numbers.setdefault(self.evaluation(instruction.number, values), len(numbers))
            self._write(instruction.number, number, values)
            execution.order.append(number)
        execution.order.sort()
        execution.instructions = sorted(i.number for i in instructions)
        return execution

    def follow(self, instructions: Sequence[Instruction], original: Execution) -> int | None:
        """Execute a block of a candidate beside the original's.

        Returns None if the block computes the same, the position of the first instruction that
        reads other values than in the original, or the number of instructions if the values at the
        end differ.  The block must have the original's instructions.
        """
        values: dict[int, int] = {}
        numbers, all_reads, all_writes = original.numbers, self.reads, self.writes
        order: list[int] = []
        value_of = values.get
        for position, instruction in enumerate(instructions):
            which = instruction.number
            number = numbers.get((which, *[value_of(r, ~r) for r in all_reads[which]]), _UNEQUAL)
            if number == _UNEQUAL:
                return position
            base = number * _MAX_RESULTS
            for register in all_writes[which]:
                values[register] = base
                base += 1
            order.append(number)
        order.sort()
        is_equal = order == original.order and values == original.final
        return None if is_equal else len(instructions)

    def evaluation(self, which: int, values: dict[int, int]) -> Evaluation:
        """The evaluation of instruction number ``which`` with these values."""
        return (which, *[values.get(r, ~r) for r in self.reads[which]])

    def _write(self, which: int, number: int, values: dict[int, int]) -> None:
        for position, register in enumerate(self.writes[which]):
            values[register] = number * _MAX_RESULTS + position

    def values_before(
        self, instructions: Sequence[Instruction], position: int, original: Execution
    ) -> dict[int, int]:
        """Values before an instruction of a candidate; all before it read the original's values."""
        values: dict[int, int] = {}
        for instruction in instructions[:position]:
            number = original.numbers[self.evaluation(instruction.number, values)]
            self._write(instruction.number, number, values)
        return values
