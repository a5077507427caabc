"""The verifier's result: safe or not, and each finding that makes a cubin unsafe.

A rule has the name that findings use: what must hold, and how well it is known.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Literal

from nostall.sass.program.instruction import Instruction


class Evidence(StrEnum):
    """How a rule is known."""

    PROVEN = "proven"
    """It follows from what the program is: other bytes or another order may compute otherwise."""
    MEASURED = "measured"
    """A schedule that broke it gave wrong results on a GPU."""
    MINED = "mined"
    """Its numbers are the smallest that compiler output has."""
    OBSERVED = "observed"
    """Compiler output keeps it everywhere that was looked at."""
    DOCUMENTED = "documented"
    """NVIDIA's documentation or nvdisasm's grammar states it."""
    ASSUMED = "assumed"
    """It is a careful guess: nothing shows that breaking it is wrong."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; a finding is one violation of it."""

    kind: str
    """Name, as in :attr:`.Finding.kind`."""
    requirement: str
    """What must hold."""
    evidence: Evidence
    source: str
    """Where the evidence is."""
    relative: bool = True
    """Whether the rule compares a candidate with its original; else it holds for any cubin."""


def _rule(
    kind: str, requirement: str, evidence: Evidence, source: str, *, absolute: bool = False
) -> Rule:
    return Rule(kind, requirement, evidence, source, not absolute)


_PERMUTATION = "a re-scheduling is a permutation of instruction words inside their blocks"
_DEPENDENCES = "definition of data dependence"
_COMPARISON = "comparison with the original's symbolic execution"
_FLOORS = "sass/safety/floors"
_RESCHEDULED = "nostall does not move what it cannot see"

RULES: tuple[Rule, ...] = (
    _rule("architecture", "the candidate is for the original's architecture",
          Evidence.PROVEN, _PERMUTATION),
    _rule("functions", "the candidate has the original's functions, of equal size",
          Evidence.PROVEN, _PERMUTATION),
    _rule("undecodable", "nvdisasm decodes the candidate", Evidence.PROVEN, _PERMUTATION),
    _rule("not-a-permutation", "each block keeps its instruction words",
          Evidence.PROVEN, _PERMUTATION),
    _rule("bytes-outside", "outside the code only recorded offsets follow the permutation",
          Evidence.PROVEN, _PERMUTATION),
    _rule("pinned-moved", "an instruction that an unreadable record may name keeps its place",
          Evidence.ASSUMED, _RESCHEDULED),
    _rule("open-changed", "a block next to code outside the function stays as it is",
          Evidence.ASSUMED, _RESCHEDULED),
    _rule("wall-changed", "a scheduling barrier keeps scoreboards, stall and batch field",
          Evidence.ASSUMED, "sass/safety/structure.py"),
    _rule("wall-crossed", "no instruction crosses a scheduling barrier",
          Evidence.ASSUMED, "sass/program/opcodes.py"),
    _rule("lost-wait", "waits of barriers and for asynchronous operations stay",
          Evidence.OBSERVED, "sass/safety/hazards/validator.py"),
    _rule("lost-order", "what is complete at a fence or barrier is complete there, too",
          Evidence.DOCUMENTED, "PTX ISA, Memory Consistency Model"),
    _rule("order-weaker", "the same, in the symbolic execution",
          Evidence.DOCUMENTED, "PTX ISA, Memory Consistency Model"),
    _rule("read-order", "two reads of one shared location keep their order",
          Evidence.DOCUMENTED, "PTX ISA, Memory Consistency Model"),
    _rule("order", "each instruction follows the same writer of each register and memory space",
          Evidence.PROVEN, _DEPENDENCES),
    _rule("wgmma-register", "registers of a warpgroup product are free after its wait",
          Evidence.DOCUMENTED, "PTX ISA, wgmma.mma_async"),
    _rule("uncovered-raw", "a scoreboard covers a result of variable latency before it is read",
          Evidence.OBSERVED, "sass/program/cover_rules.py", absolute=True),
    _rule("uncovered-waw", "a scoreboard covers a result before another overwrites it",
          Evidence.OBSERVED, "sass/program/cover_rules.py", absolute=True),
    _rule("uncovered-war", "a scoreboard covers the reading of sources before they are overwritten",
          Evidence.OBSERVED, "sass/program/cover_rules.py", absolute=True),
    _rule("unwitnessed-order", "only the original's own use, or compiler output that needs the "
          "order of a pair, lets a candidate rely on it",
          Evidence.OBSERVED, "sass/program/witnessed_pairs.json"),
    _rule("short-latency", "a pair of fixed latency keeps the distance of compiler output",
          Evidence.MINED, _FLOORS, absolute=True),
    _rule("short-issue", "neighbours keep the stall that compilers leave between their pipes",
          Evidence.MINED, _FLOORS),
    _rule("near-wall", "an instruction keeps its distance to scheduling barriers",
          Evidence.MEASURED, "a load that issued too soon after BAR.SYNC read old values (H200)"),
    _rule("scoreboard-gap", "a wait issues at least 2 cycles after the scoreboard is set",
          Evidence.OBSERVED, _FLOORS, absolute=True),
    _rule("illegal-encoding", "control words are legal, and only units that release scoreboards "
          "set them", Evidence.DOCUMENTED, "nvdisasm's grammar", absolute=True),
    _rule("stale-reuse", "no operand stays in the reuse cache when its register changes",
          Evidence.OBSERVED, "sass/safety/hazards/reuse.py", absolute=True),
    _rule("unmodelled-opcode", "each opcode has a row in the opcode table",
          Evidence.ASSUMED, "sass/program/opcodes.py", absolute=True),
    _rule("unread-targets", "the record of an indirect branch names its targets",
          Evidence.OBSERVED, "sass/program/blocks.py", absolute=True),
    _rule("unknown-register", "nvdisasm marks each register that an instruction names",
          Evidence.ASSUMED, "sass/program/defuse.py", absolute=True),
    _rule("poison", "no register of a block is read, overwritten or ordered too early",
          Evidence.MINED, "the tables above, applied by independent code", absolute=True),
    _rule("events-differ", "barriers, branches, fences and atomics get the same values",
          Evidence.PROVEN, _COMPARISON),
    _rule("memory-differs", "a block leaves the same memory", Evidence.PROVEN, _COMPARISON),
    _rule("registers-differ", "a block leaves the same registers", Evidence.PROVEN, _COMPARISON),
    _rule("exit-weaker", "a block leaves nothing more, later or less covered in flight",
          Evidence.PROVEN, _COMPARISON),
    _rule("entry-weaker", "a block protects against everything in flight when it begins",
          Evidence.PROVEN, _COMPARISON),
)  # fmt: skip
"""All rules, those of the structure first."""

BY_KIND = {rule.kind: rule for rule in RULES}
"""Name -> rule."""


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


_SUFFIXES = (".py", ".json")


@cache
def rules_digest() -> str:
    """The sha256 of all code and tables of :mod:`nostall.sass`, as a hexadecimal string."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for path in root.rglob("*") if path.suffix in _SUFFIXES):
        digest.update(f"{path.relative_to(root)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
