"""What nostall served (attention steps, linear layers), and why vLLM served the rest."""

from __future__ import annotations

import atexit
import logging
from collections import Counter

_log = logging.getLogger("nostall")
_served: Counter[str] = Counter()
_left: Counter[str] = Counter()


def count_served(kind: str) -> None:
    """Count a step, or a layer, that nostall serves."""
    if not _served and not _left:
        atexit.register(log_summary)
    _served[kind] += 1


def count_left(reason: str) -> None:
    """Count a step, or a layer, that vLLM serves; log each reason once."""
    if not _served and not _left:
        atexit.register(log_summary)
    if reason not in _left:
        _log.info("nostall: left to vLLM: %s", reason)
    _left[reason] += 1


def counts() -> dict[str, dict[str, int]]:
    """Steps by kind that nostall served, and what vLLM served by reason, since the start."""
    return {"served": dict(_served), "left to vLLM": dict(_left)}


def reset() -> None:
    """Set all counts to 0."""
    _served.clear()
    _left.clear()


def log_summary() -> None:
    """Log the counts."""
    served = ", ".join(f"{count} {kind}" for kind, count in sorted(_served.items())) or "none"
    left = "; ".join(f"{count} ({why})" for why, count in sorted(_left.items())) or "none"
    _log.info("nostall: served: %s; left to vLLM: %s", served, left)
