"""In-order queues: which variable-latency instructions read sources or deliver results in order.

Each variable-latency unit works through a queue, and compilers rely on its order in two ways.  The
scoreboard of one instruction also covers earlier instructions of its queue.  A later instruction
of a queue may overwrite the sources of an earlier one without a wait.  The rules of this module
were found in compiler output.
"""

from __future__ import annotations

from nostall.sass.program import registers
from nostall.sass.program.instruction import Instruction
from nostall.sass.program.opcodes import Pipe

_IN_ORDER_RESULTS = frozenset(("LDS", "LDSM", "SHFL", "ATOMS", "REDUX"))
"""Load/store opcodes whose results arrive in issue order.

No compiler was seen to rely on the order of LDG or LDL.
"""

_ASYNC_UNIFORM = ("UTMA", "UTC", "UBLK")
"""Prefixes of opcodes for asynchronous engines, which read uniform registers after issue."""


def result_queue(instruction: Instruction, sm: int) -> str:
    """Name of the queue that delivers the result in order, or "" if there is none."""
    if instruction.has_fixed_latency(sm):
        return ""
    if instruction.pipe is Pipe.LSU:
        return "lsu" if instruction.base in _IN_ORDER_RESULTS else ""
    if instruction.pipe is Pipe.SPECIAL:
        # Measured on an H200: an S2UR delivered before an earlier S2R.  Compilers rely on the
        # order among S2UR only.
        return "s2ur" if instruction.base == "S2UR" else ""
    return instruction.pipe


def source_queue(instruction: Instruction, sm: int) -> str:
    """Name of the queue that reads the sources in order, or "" for fixed latency."""
    return "" if instruction.has_fixed_latency(sm) else instruction.pipe


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


def drains_sources(instruction: Instruction) -> bool:
    """Whether earlier load/store instructions have read all sources before the next one issues.

    That holds after a BAR that blocks at once and has no guard.
    """
    blocks = instruction.base == "BAR" and not instruction.modifiers & {"DEFER_BLOCKING", "ARV"}
    return blocks and not instruction.is_guarded


def result_scoreboards(instruction: Instruction) -> int:
    """Bit mask of the scoreboards that the instruction releases when its own result is written.

    The success predicate of ATOM (emulated half-precision adds) comes with the read scoreboard.
    """
    control = instruction.control
    scoreboard = control.write_sb
    if scoreboard > 5 and instruction.base == "ATOM":
        scoreboard = control.read_sb
    return 1 << scoreboard if scoreboard < 6 else 0


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
