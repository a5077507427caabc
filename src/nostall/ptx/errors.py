"""Errors of the PTX level."""

from __future__ import annotations

from nostall.core.errors import BadInput


class BadPtx(BadInput):
    """A text is not PTX, or has a construct that nostall cannot read."""


def bad_ptx(line: int, problem: str, advice: str = "give a complete PTX text") -> BadPtx:
    """The error for a line of a PTX text, counted from 1."""
    return BadPtx(f"PTX line {line}: {problem}; {advice}")
