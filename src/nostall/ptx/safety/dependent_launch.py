"""Inserted instructions for programmatic dependent launch, and when they are safe.

With its launch attribute a kernel may start before the kernels before it end, and sees their
results after ``griddepcontrol.wait`` only; without the attribute the wait does nothing (PTX ISA,
griddepcontrol).  The wait is safe in the first block of a kernel, which all paths pass, if nothing
before it touches memory.  ``griddepcontrol.launch_dependents`` lets dependents start early, even
before the wait; that is safe if each of them waits, which the texts do not tell: the caller states
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nostall.ptx.safety.reading import pseudo_registers as state
from nostall.ptx.safety.reading.blocks import Block
from nostall.ptx.safety.reading.instruction import Instruction

WAIT, TRIGGER = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_HARMLESS = frozenset({state.CARRY, state.EXCHANGES, state.BARRIERS})
"""State that an instruction before the wait may touch."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """The inserted instructions of a candidate's kernel, as (block, position) in it."""

    blocks: list[Block]
    """The blocks without the inserted instructions."""
    waits: list[tuple[int, int]]
    triggers: list[tuple[int, int]]

    def problem(
        self, blocks: Sequence[Block], dependents_wait: bool
    ) -> tuple[int, int, str] | None:
        """(block, position, reason) of what is not safe in ``blocks``, the candidate's."""
        requirement = "the wait must stand once, in the first block, before all accesses of memory"
        if not self.waits:
            return (*self.triggers[0], f"dependents start early, but nothing waits; {requirement}")
        if len(self.waits) > 1 or self.waits[0][0] != 0:
            return (*self.waits[-1], f"the wait is not on every path; {requirement}")
        if self.triggers and not dependents_wait:
            reason = "dependents start early, and may not wait; state that each of them waits"
            return (*self.triggers[0], reason)
        end = self.waits[0][1]
        for position, instruction in enumerate(blocks[0].instructions[:end]):
            if (0, position) not in self.triggers and _touches_memory(instruction):
                return 0, position, f"it may access memory before the wait; {requirement}"
        return None

    def differences(self, kernel: str) -> tuple[str, ...]:
        """What the candidate does more than the original, one sentence each."""
        found = [f"kernel {kernel} waits for the kernels before it ({WAIT})"]
        if self.triggers:
            found.append(
                f"kernel {kernel} lets its dependents start early ({TRIGGER}); each must wait"
            )
        return tuple(found)


def find_inserted(blocks: Sequence[Block]) -> Inserted | None:
    """The unguarded griddepcontrol instructions of a kernel; None if there are none."""
    found = Inserted([], [], [])
    for number, block in enumerate(blocks):
        kept: list[int] = []
        for position, instruction in enumerate(block.instructions):
            is_guarded = any(r >= state.COUNT for r in instruction.reads)
            if instruction.opcode == WAIT and not is_guarded:
                found.waits.append((number, position))
            elif instruction.opcode == TRIGGER and not is_guarded:
                found.triggers.append((number, position))
            else:
                kept.append(position)
        found.blocks.append(
            replace(
                block,
                instructions=[block.instructions[at] for at in kept],
                offsets=[block.offsets[at] for at in kept],
            )
        )
    return found if found.waits or found.triggers else None


def _touches_memory(instruction: Instruction) -> bool:
    return any(
        r < state.COUNT and r not in _HARMLESS for r in (*instruction.reads, *instruction.writes)
    )
