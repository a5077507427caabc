"""The proof of a candidate's PTX, as the workers use it."""

from __future__ import annotations

from nostall.ptx.assemble.builder import CheckPtx
from nostall.ptx.safety.validate import Validator


def make_check(original: str) -> CheckPtx:
    """A check of candidates against ``original``: returns why one is refused, or an empty text."""
    validator = Validator(original)

    def check(candidate: str) -> str:
        verdict = validator.check(candidate)
        if verdict.accepted:
            return ""
        return f"{len(verdict.findings)} findings, first: {verdict.findings[0]}"

    return check
