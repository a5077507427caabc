"""What the verifier answers: safe or not, and every reason why not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.sass.program.instruction import Instruction

Half = Literal["structure", "hazards", "symbolic"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason to refuse: what kind, where (byte offset in the candidate's text), and why."""

    kind: str
    function: str
    offset: int
    instruction: str
    reason: str
    half: Half

    def __str__(self) -> str:
        where = f"{self.function}+{self.offset:#06x}"
        return f"{self.kind} at {where}: {self.instruction}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """``safe`` only when no half found anything; ``checked`` counts instructions."""

    findings: tuple[Finding, ...]
    checked: int

    @property
    def safe(self) -> bool:
        return not self.findings

    def by(self, half: Half) -> tuple[Finding, ...]:
        """The findings of one half of the verifier."""
        return tuple(f for f in self.findings if f.half == half)


def at(instruction: Instruction) -> str:
    """How a finding names another instruction."""
    return f"{instruction.opcode} (originally at {instruction.index * 16:#06x})"
