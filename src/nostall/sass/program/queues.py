"""Facts about when sources are read and in which order results arrive, found in compiler output.

Variable-latency units work through in-order queues.  Compilers rely on that: one instruction's
scoreboard also covers earlier instructions of its queue, and a later instruction of a queue may
overwrite an earlier one's sources without a wait.
"""

from __future__ import annotations

from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe

_SHARED_RESULTS = frozenset(("LDS", "LDSM", "SHFL", "ATOMS", "REDUX"))
"""Load/store opcodes whose results arrive in issue order (never seen relied on for LDG, LDL)."""


_ASYNC_UNIFORM = ("UTMA", "UTC", "UBLK")
"""Engines that fetch uniform registers themselves, after issue."""


def result_queue(instruction: Instruction, sm: int) -> str:
    """Name of the queue that delivers results in order, or "" when there is none."""
    row = instruction.row
    if row.fixed(sm):
        return ""
    if row.pipe is Pipe.LSU:
        return "lsu" if instruction.base in _SHARED_RESULTS else ""
    if row.pipe is Pipe.SPECIAL:
        # An H200 answered S2UR before an earlier S2R; compilers rely on the order of S2UR only.
        return "s2ur" if instruction.base == "S2UR" else ""
    return row.pipe


def source_queue(instruction: Instruction, sm: int) -> str:
    """Name of the queue that reads sources in order, or "" when sources are read at issue."""
    return "" if instruction.row.fixed(sm) else instruction.row.pipe


def late_sources(instruction: Instruction, sm: int) -> tuple[int, ...]:
    """The source registers that may still be read after issue.

    Predicates are read at issue.  Variable-latency instructions read uniform registers at issue,
    but for the asynchronous engines.  Of the fixed-latency ones the matrix units read everything
    late, the others uniform registers, and the uniform datapath all of its operands.
    """
    pipe = instruction.row.pipe
    uses = instruction.uses
    if instruction.row.fixed(sm):
        if pipe is Pipe.MMA:
            return tuple(r for r in uses if not registers.is_predicate(r))
        if pipe is Pipe.UNIFORM:
            return tuple(r for r in uses if r not in instruction.guards)
        return tuple(r for r in uses if registers.is_uniform(r) and not registers.is_predicate(r))
    engine = instruction.base.startswith(_ASYNC_UNIFORM)
    return tuple(
        r for r in uses if not registers.is_predicate(r) and (engine or not registers.is_uniform(r))
    )


def drains_sources(instruction: Instruction) -> bool:
    """A barrier that blocks at once stands behind every earlier access of the load/store queue."""
    blocks = instruction.base == "BAR" and not instruction.modifiers & {"DEFER_BLOCKING", "ARV"}
    return blocks and not instruction.is_guarded


def result_boards(instruction: Instruction) -> int:
    """Bit mask of the scoreboards that announce an instruction's own results.

    ATOM's success predicate (emulated half-precision adds) comes with the read scoreboard.
    """
    control = instruction.control
    board = control.write_sb
    if board > 5 and instruction.base == "ATOM":
        board = control.read_sb
    return 1 << board if board < 6 else 0


def partial_wait(instruction: Instruction) -> tuple[int, int] | None:
    """(scoreboard, n) of a ``DEPBAR.LE SBx, n``: all but the last n setters are done, which tells
    something only about operations that complete in order."""
    operands = instruction.operands
    if instruction.base != "DEPBAR" or len(operands) < 2 or not operands[0].startswith("SB"):
        return None
    try:
        count = int(operands[1], 16)
    except ValueError:
        return None
    return (int(operands[0][2:]), count) if count else None
