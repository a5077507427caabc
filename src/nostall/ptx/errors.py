"""Errors of the PTX level."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadPtx(BadInput):
    """A text is not PTX, or has a construct that nostall cannot read."""


def bad_ptx(text: str, offset: int, problem: str, advice: str) -> BadPtx:
    """The error for the character at ``offset`` of ``text``; the message gives its line number."""
    line = text.count("\n", 0, offset) + 1
    return BadPtx(f"PTX line {line}: {problem}; {advice}")
