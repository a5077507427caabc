"""Flags of the reuse cache in each operand slot, alone and against an original."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.sass.safety.test_latency import R, instruction

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.registers import SLOTS
from nostall.sass.safety.hazards.reuse import changed_reuse, stale_reuse


def product(at: int, kept: tuple[int, int, int], **fields: int) -> Instruction:
    """A product whose three slots read these registers."""
    a, b, c = kept
    text = f"FFMA R{20 + at}, R{a}, R{b}, R{c}"
    made = instruction(text, [R(20 + at)], [R(n) for n in kept], at=at, **fields)
    # The instruction word has the registers of the slots at the bits 24, 32 and 64.
    return replace(made, payload=1 << 9 | a << 24 | b << 32 | c << 64)


def function(*order: Instruction) -> Any:
    return SimpleNamespace(instructions=order, blocks=[SimpleNamespace(start=0, end=len(order))])


@pytest.mark.parametrize("slot", range(len(SLOTS)))
def test_each_slot_is_checked(slot: int) -> None:
    kept, other = (1, 2, 3), (7, 8, 9)
    reader = product(1, kept)
    first = product(0, kept, reuse=1 << slot)
    foreign = product(2, other)
    original = function(first, reader, foreign)
    assert not list(changed_reuse(original, original))
    ((moved, reason),) = changed_reuse(original, function(first, foreign, reader))
    assert moved is first and f"keeps slot {SLOTS[slot]} of the reuse cache" in reason
    plain = product(0, kept)
    ((added, reason),) = changed_reuse(function(plain, reader), function(first, reader))
    assert added is first and "that the original does not set" in reason
    dropped = list(changed_reuse(function(first, reader), function(plain, reader)))
    assert not dropped  # without the flag the operand is read again


@pytest.mark.parametrize("slot", range(len(SLOTS)))
def test_a_redefinition_before_the_reuse_is_stale_in_each_slot(slot: int) -> None:
    kept = (1, 2, 3)
    first, reader = product(0, kept, reuse=1 << slot), product(9, kept)
    write = instruction(f"MOV R{kept[slot]}, 0x1", [R(kept[slot])], [], at=1)
    assert not list(stale_reuse([first, reader, write]))
    ((found, reason),) = stale_reuse([first, write, reader])
    assert found is first and f"slot {SLOTS[slot]}" in reason and "MOV redefines" in reason
