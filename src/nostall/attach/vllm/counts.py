"""What nostall served (attention steps, linear layers), and why vLLM served the rest."""

from __future__ import annotations

import atexit
import logging
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

_log = logging.getLogger("nostall")
_served: Counter[str] = Counter()
_left: Counter[str] = Counter()
_prefixes: list[tuple[Callable[[], Any], int]] = []


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


@cache
def log_once(message: str) -> None:
    """Log a line, if this process has not logged it."""
    _log.info("nostall: %s", message)


def watch_prefixes(read: Callable[[], Any], layers: int) -> None:
    """Report the sums over the steps of so many layers.

    ``read`` returns :class:`nostall.serving.tables.device.Totals`.
    """
    _prefixes.append((read, layers))


def shared_prefixes() -> dict[str, int]:
    """Steps whose tables looked for shared prefixes, what they found and saved, since the start.

    A step that is built twice, for the layers and for a captured graph, counts once for each. Waits
    for the device.
    """
    sums: Counter[str] = Counter()
    for read, layers in _prefixes:
        try:
            totals = read()
        except RuntimeError as error:  # The device may be gone when a process ends.
            _log.info("nostall: sums of shared prefixes are not known: %s", error)
            continue
        sums["steps"] += totals.builds
        sums["with shared prefixes"] += totals.shared
        sums["beyond the capacity"] += totals.left
        sums["saved us (modelled)"] += totals.saved_ns * layers // 1000
    return dict(sums)


def counts() -> dict[str, dict[str, int]]:
    """Steps by kind that nostall served, and what vLLM served by reason, since the start."""
    found = {"served": dict(_served), "left to vLLM": dict(_left)}
    return found | ({"shared prefixes": shared_prefixes()} if _prefixes else {})


def reset() -> None:
    """Set all counts to 0, and forget what was logged."""
    _served.clear()
    _left.clear()
    _prefixes.clear()
    log_once.cache_clear()


def log_summary() -> None:
    """Log the counts."""
    served = ", ".join(f"{count} {kind}" for kind, count in sorted(_served.items())) or "none"
    left = "; ".join(f"{count} ({why})" for why, count in sorted(_left.items())) or "none"
    _log.info("nostall: served: %s; left to vLLM: %s", served, left)
    if _prefixes:
        found = ", ".join(f"{name} {count}" for name, count in shared_prefixes().items())
        _log.info("nostall: steps read once what sequences share: %s", found)
