"""What is written down of a result: the verdict, the comparison, and what to know about it."""

from __future__ import annotations

from typing import Any

from nostall.core import Tolerance
from nostall.core.measurement import Kind
from nostall.sass import Verdict
from nostall.tuning.gpu_objective import Decision

_INTERVALS = ("ratio", "low", "high", "null_low", "null_high")


def compared_how(checks: int, near: Tolerance | None) -> dict[str, Any]:
    """On how much, and how strictly, the winner's outputs were compared with the original's."""
    return {
        "checks": checks,
        "equal": f"within {near}" if near else "bit by bit",
        "tolerance": near.model_dump() if near else None,
    }


def comparison_of(decision: Decision) -> dict[str, Any]:
    """The decision with all its samples."""
    compared, timing = decision.comparison, decision.outcome.timing
    if compared is None or timing is None:
        return {"fate": decision.outcome.status, "detail": decision.outcome.detail}
    return {
        "fate": decision.outcome.status,
        "verdict": compared.verdict,
        **{key: getattr(compared, key) for key in _INTERVALS},
        "samples": {
            "original": timing.original,
            "candidate": timing.candidate,
            "null": timing.null,
        },
    }


def verdict_of(verdict: Verdict) -> dict[str, Any]:
    """What the verifier said."""
    return {
        "safe": verdict.safe,
        "checked": verdict.checked,
        "findings": [str(f) for f in verdict.findings[:20]],
    }


def notes_on(sm: int, kind: Kind) -> tuple[str, ...]:
    """What the user of an optimised cubin should know about it."""
    notes = [".debug_line and .nv_debug_line_sass still describe the original order"]
    if sm >= 100:
        notes.append(".nv.capmerc keeps the original code")
        if kind == "modelled":
            notes.append("not measured on this architecture")
    return tuple(notes)
