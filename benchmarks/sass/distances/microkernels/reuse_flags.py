"""Reuse flags that an instruction can carry."""

from __future__ import annotations

from benchmarks.sass.distances.microkernels.lines import base
from benchmarks.sass.distances.microkernels.words import FIELDS, FORMS
from nostall.sass.binary.encoding import Control
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe
from nostall.sass.program.registers import slot_register

_PIPES = (Pipe.INT, Pipe.FMA, Pipe.HALF, Pipe.DOUBLE)
_WITHOUT = ("CS2R", "VOTE", "PLOP3", "P2R", "R2P", "BRA")


def reuse_flags(form: str, payload: int) -> int:
    """The flags of every operand slot with a general register; 0 for units without the cache."""
    uses = tuple(FIELDS[f].get(payload) for f in "abc" if f"R{{{f}}}" in form.replace("UR{", "U{"))
    opcode = form.partition(" ")[0]
    instruction = Instruction(
        0, form, payload, Control(1, False), opcode, None, (), (), uses, (), frozenset()
    )
    if instruction.pipe not in _PIPES or base(form) in _WITHOUT or form not in FORMS:
        return 0
    return sum(1 << slot for slot in range(3) if slot_register(instruction, slot) is not None)
