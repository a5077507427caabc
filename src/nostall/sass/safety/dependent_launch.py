"""Rule for kernels that are launched with the attribute of programmatic dependent launch.

Such a kernel may start while the kernels before it still run.  Until ``ACQBULK``
(griddepcontrol.wait) it may therefore use registers and its own parameters only.  The rule is
absolute: it looks at machine code alone, so it covers the compiler, ptxas and all moves.
"""

from __future__ import annotations

import re

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function, Program

WAIT, TRIGGER = "ACQBULK", "PREEXIT"
_BANK = re.compile(r"\bc[a-z]*\[([^\]]*)\]")
_PARAMETERS = "0x0"
"""Constant bank with the launch's own parameters; earlier kernels may write the others."""


def wait_problem(function: Function) -> str:
    """Why the kernel must not be launched with the attribute, or an empty text.

    The wait must stand in the first block, which every path to an access or an exit passes, without
    a guard, and nothing before it may access memory or be a scheduling barrier.
    """
    waits = find_waits(function)
    if not waits:
        return f"{function.name} has no {WAIT}: it would not wait for the kernels before it"
    first = waits[0]
    instruction = function.instructions[first]
    if first >= function.blocks[0].end:
        return f"{function.name} has its first {WAIT} after a branch, so a path may lack it"
    if instruction.is_guarded:
        return f"the {WAIT} of {function.name} has a guard, so some threads may not wait"
    for position, before in enumerate(function.instructions[:first]):
        if before.base != TRIGGER and not uses_registers_only(before):
            return f"{before.text!r} at position {position} of {function.name} precedes its {WAIT}"
    return ""


def check_wait(cubin: bytes, kernel: str) -> str:
    """:func:`wait_problem` of a kernel of a cubin; raises the errors of :class:`Program`."""
    return wait_problem(Program.of_kernel(cubin, kernel).kernel(kernel))


def find_waits(function: Function) -> list[int]:
    """The positions of the waits."""
    return [at for at, i in enumerate(function.instructions) if i.base == WAIT]


def uses_registers_only(instruction: Instruction) -> bool:
    """Whether an instruction uses registers and kernel parameters only, and orders nothing."""
    return (
        instruction.is_known_opcode
        and not instruction.is_barrier
        and not instruction.accesses_memory
        and all(bank == _PARAMETERS for bank in _BANK.findall(instruction.text))
    )
