"""Parts that all sections of the page of the learners share."""

from __future__ import annotations


def goal(value: float, limit: float, *, at_most: bool = False) -> str:
    """A figure with its goal, and whether it is missed."""
    is_missed = value > limit if at_most else value < limit
    sign = "≤" if at_most else "≥"
    return f"{value:.3f} (goal {sign} {limit:g}{', missed' if is_missed else ''})"
