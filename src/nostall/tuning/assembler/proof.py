"""The proof of a candidate's PTX, as the workers use it."""

from __future__ import annotations

from nostall.ptx.assemble.builder import CheckPtx
from nostall.ptx.safety.validate import Validator


def make_check(original: str, *, dependents_wait: bool = False) -> CheckPtx:
    """A check of candidates against ``original``: returns why one is refused, or an empty text.

    ``dependents_wait``: whether each dependent of the kernel waits for it, as the user states.
    """
    validator = Validator(original, dependents_wait=dependents_wait)

    def check(candidate: str) -> str:
        verdict = validator.check(candidate)
        if verdict.accepted:
            return ""
        return f"{len(verdict.findings)} findings, first: {verdict.findings[0]}"

    return check
