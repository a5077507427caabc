"""An operation that a scan of a block tracks until an instruction waits for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from nostall.sass.program.instruction import Instruction


@dataclass(slots=True)
class Pending:
    """A variable-latency result, or sources read after issue, that the scan still tracks.

    For memory accesses and walls also a scoreboard that announces their completion without
    registers, because others may rely on it.
    """

    instruction: Instruction
    is_result: bool
    group: str
    """Group of the operation in the in-order rules; "" without one."""
    registers: frozenset[int]
    proofs: dict[int, int]
    """Scoreboard -> the instruction that sets it: this one, or a later one of the same queue."""
    waiter: int | None = None
    """The instruction that waits for the completion, once the scan has passed it."""
    assumed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(scoreboard, later instruction of the same queue that sets it) of pairs without witnesses."""
    assumed_waits: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(scoreboard, instruction that sets it, instruction that waits for it) of these."""
