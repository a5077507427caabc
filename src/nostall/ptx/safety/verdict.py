"""Result of the validator: accepted or refused, and the findings that refuse a candidate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One place where the candidate is not proved equal to the original."""

    kind: str
    """Name of the rule, such as ``memory-order``; see :mod:`nostall.ptx.safety.function_proof`."""
    function: str
    """Name of the function in the original; empty if the finding is about the whole module."""
    line: int
    """Line in the candidate, from 1."""
    text: str
    """The statement in the candidate, with single spaces; empty if there is none."""
    reason: str
    """The difference, and the requirement."""

    def __str__(self) -> str:
        place = f"{self.function}, line {self.line}" if self.function else f"line {self.line}"
        return f"{self.kind} ({place}): {self.text}: {self.reason}"

    def as_record(self) -> dict[str, str | int]:
        """The finding as JSON fields."""
        return {
            "kind": self.kind,
            "function": self.function,
            "line": self.line,
            "text": self.text,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """All findings about one candidate, and its allowed differences from the original."""

    findings: tuple[Finding, ...]
    differences: tuple[str, ...] = ()
    """Allowed differences other than the order of instructions, one sentence each."""
    checked: int = 0
    """Number of instructions that were executed; a block in braces counts as one."""

    @property
    def accepted(self) -> bool:
        """Whether the candidate is proved equal: there is no finding."""
        return not self.findings
