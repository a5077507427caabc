"""Moves the wait of a dependent launch down, to just before the first access of memory.

ptxas places ``ACQBULK`` (griddepcontrol.wait) near the start of a kernel, wherever it stands in the
PTX.  Address arithmetic after it then does not overlap with the kernel before.
"""

from __future__ import annotations

from nostall.sass.program.instruction import Instruction
from nostall.sass.program.program import Function, Program
from nostall.sass.safety.dependent_launch import find_waits, uses_registers_only

_MAX_STALL = 11
"""Longest stall without the yield flag."""
_WAIT_STALL = 15
"""Stall of the wait at its new place; ptxas chose its own for another next instruction."""


def sink_wait(cubin: bytes, kernel: str) -> bytes:
    """The cubin with the wait of ``kernel`` further down; unchanged if it cannot move.

    The cubin must have one wait, in the first block.  Raises the errors of :class:`Program`.
    """
    program = Program.of_kernel(cubin, kernel)
    function = program.kernel(kernel)
    waits = find_waits(function)
    if len(waits) != 1:
        return cubin
    moved = _sunk(function, waits[0])
    return cubin if moved is None else program.with_function(moved).to_cubin()


def _sunk(function: Function, start: int) -> Function | None:
    """The function with the wait at position ``start`` moved down; None if it cannot move."""
    order = list(function.instructions)
    end = _last_passed(function, start)
    if start == 0 or end == start or order[start].is_guarded:
        return None
    before, wait, after = order[start - 1], order[start], order[start + 1]
    stall = before.control.stall + wait.control.stall
    if stall > _MAX_STALL or wait.control.drains or wait.index in function.pinned:
        return None
    # Neighbours of the wait keep their distance, and what the wait awaited is still awaited.
    order[start - 1] = before.with_control(before.control.with_(stall=stall, reuse=0))
    order[start + 1] = after.with_control(
        after.control.with_(wait=after.control.wait | wait.control.wait)
    )
    last = order[end]
    order[end] = last.with_control(last.control.with_(reuse=0))
    late = wait.with_control(wait.control.with_(stall=_WAIT_STALL, yields=True))
    return function.reordered(
        [*order[:start], *order[start + 1 : end + 1], late, *order[end + 1 :]]
    )


def _last_passed(function: Function, start: int) -> int:
    """The last position that the wait may pass."""
    at = start
    while at + 1 < function.blocks[0].end and _may_pass(function, function.instructions[at + 1]):
        at += 1
    return at


def _may_pass(function: Function, instruction: Instruction) -> bool:
    is_fixed = instruction.index in function.pinned or instruction.index in function.frozen
    return uses_registers_only(instruction) and not is_fixed
