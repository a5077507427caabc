"""Warnings that are logged once in a process, so that the log of a long run stays readable."""

from __future__ import annotations

import logging

_log = logging.getLogger("nostall")
_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged the same message before."""
    if message not in _warned:
        _warned.add(message)
        _log.warning("nostall: %s", message)
