"""Reads after issue, and what scoreboards announce beyond the result of their instruction.

The order inside the units is in :mod:`.cover_rules`.
"""

from __future__ import annotations

from typing import NamedTuple

from nostall.sass.program import registers
from nostall.sass.program.cover_rules import COVER, Claim, CoverTable
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe

_ASYNC_UNIFORM = ("UTMA", "UTC", "UBLK")
"""Prefixes of opcodes for asynchronous engines, which read uniform registers after issue."""


def late_sources(instruction: Instruction, sm: int) -> tuple[int, ...]:
    """The source registers that the hardware may still read after issue.

    - Predicates are always read at issue.
    - Variable latency: all other sources are read late, except that only asynchronous engines
      read uniform registers late.
    - Fixed latency: the matrix units read everything late, the uniform datapath everything except
      its guard, and the other pipes only uniform registers.
    """
    uses = instruction.uses
    if instruction.has_fixed_latency(sm):
        if instruction.pipe is Pipe.MMA:
            return tuple(r for r in uses if not registers.is_predicate(r))
        if instruction.pipe is Pipe.UNIFORM:
            return tuple(r for r in uses if r not in instruction.guard_registers)
        return tuple(r for r in uses if registers.is_uniform(r) and not registers.is_predicate(r))
    is_async = instruction.base.startswith(_ASYNC_UNIFORM)
    return tuple(
        r
        for r in uses
        if not registers.is_predicate(r) and (is_async or not registers.is_uniform(r))
    )


def drained_sources(
    instruction: Instruction, sm: int, cover: CoverTable = COVER, *, witnessed: bool
) -> frozenset[str]:
    """Groups of earlier instructions whose sources are read when the next instruction issues.

    That holds after a BAR that blocks at once and has no guard.  ``witnessed``: those of the pairs
    with witnesses, or those of the other pairs.
    """
    if instruction.base != "BAR" or instruction.is_guarded:
        return frozenset()
    if instruction.modifiers & {"DEFER_BLOCKING", "ARV"}:
        return frozenset()
    return cover.proofs("BAR", sm, witnessed=witnessed).drained


class Announced(NamedTuple):
    """A part of an instruction's result, with its own scoreboards."""

    registers: tuple[int, ...]
    scoreboards: int
    """Bit mask of the scoreboards that are released when the registers are written."""


def announced_results(
    instruction: Instruction, cover: CoverTable = COVER
) -> tuple[Announced, Announced | None]:
    """The result of an instruction, and the part that comes earlier with another scoreboard.

    The success predicate of ATOM comes with the read scoreboard, its register with the write
    scoreboard.  An ATOM without a register has its predicate as its only result.
    """
    control, defs = instruction.control, instruction.defs
    write = 1 << control.write_sb if control.write_sb < 6 else 0
    predicates = tuple(r for r in defs if registers.is_predicate(r))
    if (
        not predicates
        or control.read_sb > 5
        or instruction.base != "ATOM"
        or all(rule.claim is not Claim.READ_PROVES_PREDICATE for rule in cover.rules)
    ):
        return Announced(defs, write), None
    early = Announced(predicates, 1 << control.read_sb)
    if len(predicates) == len(defs):
        return early, None
    return Announced(tuple(r for r in defs if r not in predicates), write), early


def partial_wait(instruction: Instruction) -> tuple[int, int] | None:
    """(scoreboard, n) of ``DEPBAR.LE SBx, n`` with n > 0; None for any other instruction.

    After it, all but the last n instructions that set the scoreboard have completed.  That is
    known only for instructions that complete in order.
    """
    operands = instruction.operands
    if instruction.base != "DEPBAR" or len(operands) < 2 or not operands[0].startswith("SB"):
        return None
    try:
        count = int(operands[1], 16)
    except ValueError:
        return None
    return (int(operands[0][2:]), count) if count else None
