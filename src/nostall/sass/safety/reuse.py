"""Stale operand caches: ``.reuse`` keeps an operand for the next instruction's same slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function
from nostall.sass.program.slots import SLOTS, slot_register


def stale_reuse(order: Sequence[Instruction]) -> Iterator[tuple[Instruction, str]]:
    """Instructions of one block whose cached operand is redefined before it is reused."""
    for at, first in enumerate(order):
        if not first.control.reuse or first.batch_field:
            continue
        for slot in range(3):
            if first.control.reuse >> slot & 1:
                register = slot_register(first, slot)
                if register is not None and (why := _stale(order, at, slot, register)):
                    yield first, why


def _stale(order: Sequence[Instruction], at: int, slot: int, register: int) -> str | None:
    redefined: Instruction | None = None
    for later in order[at:]:
        if later is not order[at] and slot_register(later, slot) is not None:
            if redefined is not None and slot_register(later, slot) == register:
                return (
                    f"keeps R{register} in slot {SLOTS[slot]} for {later.opcode}, but "
                    f"{redefined.opcode} redefines it in between"
                )
            return None
        if register in later.defs:
            redefined = redefined or later
    return None


def changed_reuse(original: Function, candidate: Function) -> Iterator[tuple[Instruction, str]]:
    """Reuse flags that are new, or stand before another word than in the original, and are not
    shown safe: the next word reads the same register in the same slot, and this one keeps it."""
    for block in candidate.blocks:
        before = _followers(original.instructions[block.start : block.end])
        order = candidate.instructions[block.start : block.end]
        after = _followers(order)
        for instruction in order:
            flags = instruction.control.reuse
            old_flags, old_next = before[instruction.index]
            following = after[instruction.index][1]
            if flags & ~old_flags:
                yield instruction, "caches an operand slot that the original did not"
            kept = old_flags if _index(old_next) == _index(following) else 0
            for slot in range(3):
                if (flags & ~kept) >> slot & 1 and not _shown_safe(instruction, following, slot):
                    yield (
                        instruction,
                        f"caches slot {SLOTS[slot]} for another instruction than in the original",
                    )


def _followers(order: Sequence[Instruction]) -> dict[int, tuple[int, Instruction | None]]:
    ends: list[Instruction | None] = [*order[1:], None]
    return {i.index: (i.control.reuse, j) for i, j in zip(order, ends, strict=True)}


def _index(instruction: Instruction | None) -> int:
    return -1 if instruction is None else instruction.index


def _shown_safe(first: Instruction, following: Instruction | None, slot: int) -> bool:
    register = slot_register(first, slot)
    return (
        following is not None
        and register is not None
        and register not in first.defs
        and slot_register(following, slot) == register
    )
