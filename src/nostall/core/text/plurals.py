"""Numbers with their nouns in the singular or plural."""

from __future__ import annotations


def pluralize(count: int, noun: str) -> str:
    """A number with its noun: ``1 launch``, ``2,000 launches``."""
    ending = "" if count == 1 else "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{ending}"
