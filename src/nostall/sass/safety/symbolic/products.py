"""Warpgroup products of one block that run after they issue, and accesses to their registers."""

from __future__ import annotations

from dataclasses import dataclass, field

from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe

_COMMIT = "gsb0"


@dataclass(slots=True)
class RunningProducts:
    """The products of a block that no wait has completed yet."""

    running: list[tuple[Instruction, int]] = field(default_factory=list[tuple[Instruction, int]])
    """(product, number of the group that contains it)."""
    group: int = 0
    """Number of the group that the next commit closes."""
    accesses: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(product, instruction) of accesses to registers that the product still uses, by index."""

    def execute(self, instruction: Instruction) -> None:
        """Execute one instruction of the block."""
        if instruction.pipe is Pipe.GMMA:
            self._check(instruction)
            self.running.append((instruction, self.group))
            self.group += _COMMIT in instruction.operands
        elif self.running:
            if instruction.base == "WARPGROUP" and "DEPBAR" in instruction.modifiers:
                oldest = self.group - int(instruction.operands[-1], 16)
                self.running = [(p, group) for p, group in self.running if group >= oldest]
            else:
                self._check(instruction)

    def _check(self, instruction: Instruction) -> None:
        written = set(instruction.defs)
        read = set(instruction.uses)
        if instruction.pipe is Pipe.GMMA:
            read -= written  # products follow each other on the same accumulators
        for product, _ in self.running:
            results = set(product.defs)
            operand = {r for r in product.uses if r < 256 and not registers.is_predicate(r)}
            free = results if instruction.pipe is Pipe.GMMA else set[int]()
            if (results & read) or (written & (operand | results) - free):
                self.accesses.add((product.index, instruction.index))
