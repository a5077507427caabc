"""Registers that asynchronous matrix instructions use after their issue."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.ptx.program.instruction import Instruction
from nostall.ptx.program.resources import Resource

_ASYNCHRONOUS: tuple[tuple[str, Resource], ...] = (
    ("wgmma.mma_async", Resource.WGMMA),
    ("tcgen05", Resource.TCGEN05),
)
"""Opcode that uses registers after its issue -> resource that its waits and fences write."""


def mark_asynchronous_registers(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Let each instruction that touches a register of an asynchronous one read its resource.

    A wait names no register, but the program may read accumulators only after it, and write
    fragments only before a fence. The registers of all such instructions of the function count,
    because those in flight at a wait may have been named in another block, and so do copies: Triton
    copies accumulators before a wait and names the copies in a comment, and ptxas makes both one
    register.
    """
    marked = list(instructions)
    for opcode, resource in _ASYNCHRONOUS:
        users = {i.index for i in marked if f"{i.opcode}.".startswith(f"{opcode}.")}
        registers = _with_copies(
            marked, frozenset(name for index in users for name in marked[index].registers)
        )
        if registers:
            marked = [
                i.with_reads(resource) if i.index in users or i.registers & registers else i
                for i in marked
            ]
    return marked


def _with_copies(instructions: Sequence[Instruction], registers: frozenset[str]) -> frozenset[str]:
    """``registers``, those that a ``mov`` copies them to, and so on."""
    while True:
        copies = frozenset(
            name
            for i in instructions
            if i.base == "mov" and i.registers & registers
            for name in i.writes
            if isinstance(name, str)
        )
        if copies <= registers:
            return registers
        registers |= copies
