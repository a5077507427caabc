"""The verifier's result: safe or not, and each finding that makes a cubin unsafe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.sass.program.instruction import Instruction
from nostall.sass.safety.rules import BY_KIND

Part = Literal["structure", "hazards", "symbolic"]
"""The part of the verifier that reports a finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation of a rule."""

    kind: str
    """Name of the rule, such as ``short-latency``."""
    function: str
    """Name of the function; empty if the finding is about the whole cubin."""
    offset: int
    """Byte offset of the instruction in the candidate's function."""
    instruction: str
    """Text of the instruction."""
    reason: str
    """The violation, and the requirement."""
    part: Part

    @property
    def evidence(self) -> str:
        """How the rule is known, and where that is shown; see :mod:`.rules`."""
        rule = BY_KIND[self.kind]
        return f"{rule.evidence}: {rule.source}"

    def __str__(self) -> str:
        place = f"{self.function}+{self.offset:#06x}"
        return f"{self.kind} at {place}: {self.instruction}: {self.reason}"

    def as_record(self) -> dict[str, str | int]:
        """The finding as JSON fields; ``part`` is stored as ``half``."""
        return {
            "kind": self.kind,
            "function": self.function,
            "offset": self.offset,
            "instruction": self.instruction,
            "reason": self.reason,
            "half": self.part,
            "requirement": BY_KIND[self.kind].requirement,
            "evidence": self.evidence,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings about a cubin."""

    findings: tuple[Finding, ...]
    checked: int
    """Number of instructions that were checked."""
    remarks: tuple[Finding, ...] = ()
    """Possible faults of the original as the compiler wrote it; a candidate must not add any."""

    @property
    def safe(self) -> bool:
        """Whether no part of the verifier has a finding."""
        return not self.findings


def describe(instruction: Instruction) -> str:
    """Text by which a finding names another instruction: opcode and original byte offset."""
    return f"{instruction.opcode} (originally at {instruction.index * 16:#06x})"
