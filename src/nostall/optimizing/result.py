"""What ``nostall optimize`` found: the attempts, what is kept, and the JSON document."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from nostall import __version__
from nostall.core.measurement import Comparison
from nostall.optimizing.diagnosis import Facts, Level
from nostall.optimizing.proof import Proof

SCHEMA = 1
CLEAR = 1.05
"""Times the null's upper end from which the first rounds of blocks decide for a change."""
SMALL_GAIN = 1.01
"""Upper end of an interval below which the first rounds of blocks decide against a change."""
Outcome = Literal["kept", "replaced", "dropped", "refused", "undecided"]
"""Of an attempt; *undecided*: the time was up before enough starts were measured."""


@dataclass(frozen=True)
class Attempt:
    """One change that was tried."""

    level: Level
    outcome: Outcome
    reason: str
    result_class: str
    proof: Proof | None = None
    warm_seconds: float = 0.0
    """Seconds until the change was ready, compiling included."""
    kernels: Sequence[Mapping[str, Any]] = ()
    """Of each searched kernel: launches a step, seconds of a launch, and its record in the store;
    or why it has none."""

    def as_json(self) -> dict[str, Any]:
        kernels = {"kernels": list(self.kernels)} if self.kernels else {}
        return {
            "change": self.level.change, "outcome": self.outcome, "reason": self.reason,
            "class": self.result_class, "warm_seconds": self.warm_seconds,
            "proof": proof_json(self.proof), **kernels,
        }  # fmt: skip


@dataclass
class Result:
    """Everything of one run of the command."""

    command: list[str]
    step: str | None = None
    """The function that ends a step, as given."""
    facts: Facts | None = None
    levels: list[Level] = field(default_factory=list)
    certificate: str = ""
    attempts: list[Attempt] = field(default_factory=list)
    together: Proof | None = None
    """The kept changes together beside the original, measured after all attempts."""
    again: Proof | None = None
    """The same in a second start of the program."""
    notes: list[str] = field(default_factory=list)
    """What the reader has to know, a sentence each."""
    command_files: dict[str, str] = field(default_factory=dict)
    """sha256 of the files that the command names."""
    limit: str = ""
    """The time limit, as given, that ended the attempts; empty if none did."""
    files: list[str] = field(default_factory=list)
    """Files that were written while the program was watched."""
    interrupted: bool = False
    exit_code: int = 0
    """The program's own exit code; 0 if nostall ended it."""

    @property
    def kept(self) -> list[Attempt]:
        """The attempts that are handed over."""
        return [attempt for attempt in self.attempts if attempt.outcome == "kept"]

    @property
    def machine(self) -> dict[str, str | None]:
        """What a bundle is valid for."""
        raw: Mapping[str, Any] = self.facts.raw if self.facts else {}
        return {name: raw.get(name) for name in ("device", "driver", "torch")}

    def as_json(self) -> dict[str, Any]:
        """The document of ``--format json``."""
        return {
            "schema": SCHEMA,
            "nostall": __version__,
            "command": self.command,
            "command_files": self.command_files,
            "step": self.step,
            "kind": "measured",
            **self.machine,
            "watched": dict(self.facts.raw) if self.facts else None,
            "levels": [asdict(level) for level in self.levels],
            "certificate_of_no_gain": self.certificate or None,
            "attempts": [attempt.as_json() for attempt in self.attempts],
            "kept": [attempt.level.name for attempt in self.kept],
            "together": proof_json(self.together),
            "second_start": proof_json(self.again),
            "lines": [attempt.level.line for attempt in self.kept],
            "files_written_while_watched": self.files,
            "notes": self.notes,
            "program_exit_code": self.exit_code,
        }


def drop(result: Result, reason: str) -> None:
    """Drop all kept changes, for one reason more."""
    result.attempts = [
        replace(a, outcome="dropped", reason=f"{a.reason}; {reason}") if a.outcome == "kept" else a
        for a in result.attempts
    ]


def proof_json(proof: Proof | None) -> dict[str, Any] | None:
    """A proof as JSON; None without one."""
    if proof is None:
        return None
    c = proof.comparison
    numbers: dict[str, Any] = {} if c is None else {
        "ratio": c.ratio, "interval": [c.low, c.high], "null_interval": [c.null_low, c.null_high],
        "verdict": c.verdict, "step_seconds": list(proof.seconds),
    }  # fmt: skip
    return {"pairs": proof.pairs, "refusal": proof.refusal or None, **numbers}


def one_after_the_other(result: Result) -> Proof:
    """The product of the kept gains, each of which was measured on top of those before it."""
    proofs = [a.proof for a in result.attempts if a.outcome in ("kept", "replaced")]
    parts = [proof.comparison for proof in proofs if proof is not None and proof.comparison]
    first, last = proofs[0], proofs[-1]
    assert first is not None and last is not None
    ratio, low, high = (
        math.prod(getattr(part, name) for part in parts) for name in ("ratio", "low", "high")
    )
    null_low, null_high = min(p.null_low for p in parts), max(p.null_high for p in parts)
    product = Comparison(ratio, low, high, null_low, null_high, "measured")
    pairs = min(proof.pairs for proof in proofs if proof is not None)
    return Proof(product, "", pairs, (first.seconds[0], last.seconds[1]))


def drifts(comparison: Comparison) -> bool:
    """Whether the original differs from itself: its null interval excludes 1."""
    return not comparison.null_low <= 1 <= comparison.null_high


def interval(comparison: Comparison) -> str:
    """A ratio and its 95 % interval."""
    return f"{comparison.ratio:.3f} [{comparison.low:.3f}, {comparison.high:.3f}]"


def gains(attempt: Attempt, least: float) -> bool:
    """Whether the interval of a gain is above ``least``."""
    comparison = attempt.proof.comparison if attempt.proof is not None else None
    return comparison is not None and comparison.low > least


def same_place(one: Level, other: Level) -> bool:
    """Whether two changes set the same option, as two back ends do."""
    return bool(one.change and other.change and one.change["kind"] == other.change["kind"])


def is_clear(proof: Proof) -> bool:
    """Whether more blocks would hardly change a verdict."""
    c = proof.comparison
    if c is None or proof.refusal:
        return False
    return c.low > CLEAR * max(1.0, c.null_high) or c.high < SMALL_GAIN


def outcome_of(proof: Proof) -> tuple[Any, str]:
    if proof.refusal:
        return "refused", proof.refusal
    assert proof.comparison is not None
    numbers = interval(proof.comparison)
    if proof.faster:
        return "kept", f"{numbers} times as fast"
    null = f"null [{proof.comparison.null_low:.3f}, {proof.comparison.null_high:.3f}]"
    return "dropped", f"not faster: {numbers}, {null}"
