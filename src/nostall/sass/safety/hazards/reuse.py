"""Stale entries of the reuse cache.

``.reuse`` keeps an operand for the same operand slot of the next instruction that uses the slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.program.registers import SLOTS, slot_register


def stale_reuse(order: Sequence[Instruction]) -> Iterator[tuple[Instruction, str]]:
    """Instructions of one block whose cached operand is redefined before it is reused.

    Yields (instruction, reason).
    """
    for position, first in enumerate(order):
        if not first.control.reuse or first.has_batch_field:
            continue
        for slot in range(3):
            if first.control.reuse >> slot & 1:
                register = slot_register(first, slot)
                if register is not None and (
                    reason := _stale_reason(order, position, slot, register)
                ):
                    yield first, reason


def _stale_reason(
    order: Sequence[Instruction], position: int, slot: int, register: int
) -> str | None:
    """Why the operand that instruction ``position`` keeps in ``slot`` becomes stale, or None."""
    redefinition: Instruction | None = None
    for later in order[position:]:
        if later is not order[position] and slot_register(later, slot) is not None:
            if redefinition is not None and slot_register(later, slot) == register:
                return (
                    f"keeps R{register} in slot {SLOTS[slot]} of the reuse cache for "
                    f"{later.opcode}, but {redefinition.opcode} redefines R{register} before that"
                )
            return None
        if register in later.defs:
            redefinition = redefinition or later
    return None


def changed_reuse(original: Function, candidate: Function) -> Iterator[tuple[Instruction, str]]:
    """Reuse flags that are new, or that now precede another instruction and may be wrong there.

    A flag before another instruction is safe if that instruction reads the same register in the
    same slot and this one does not redefine it.  Yields (instruction, reason).
    """
    for block in candidate.blocks:
        before = _flags_and_successors(original.instructions[block.start : block.end])
        order = candidate.instructions[block.start : block.end]
        after = _flags_and_successors(order)
        for instruction in order:
            flags = instruction.control.reuse
            old_flags, old_successor = before[instruction.index]
            successor = after[instruction.index][1]
            if flags & ~old_flags:
                yield instruction, "sets a reuse flag that the original does not set"
            unchanged = old_flags if _index(old_successor) == _index(successor) else 0
            for slot in range(3):
                if (flags & ~unchanged) >> slot & 1 and not _is_safe(instruction, successor, slot):
                    yield (
                        instruction,
                        f"keeps slot {SLOTS[slot]} of the reuse cache for another instruction "
                        "than in the original; that one must read the same register in the slot",
                    )


def _flags_and_successors(
    order: Sequence[Instruction],
) -> dict[int, tuple[int, Instruction | None]]:
    """Index -> (reuse flags, next instruction of the block) of each instruction."""
    successors: list[Instruction | None] = [*order[1:], None]
    return {i.index: (i.control.reuse, j) for i, j in zip(order, successors, strict=True)}


def _index(instruction: Instruction | None) -> int:
    return -1 if instruction is None else instruction.index


def _is_safe(first: Instruction, successor: Instruction | None, slot: int) -> bool:
    """Whether ``successor`` reads in ``slot`` the register that ``first`` keeps, unchanged."""
    register = slot_register(first, slot)
    return (
        successor is not None
        and register is not None
        and register not in first.defs
        and slot_register(successor, slot) == register
    )
