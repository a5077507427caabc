"""What is wrong is said once: a program that runs must go on running, and its log be read."""

from __future__ import annotations

import logging

_log = logging.getLogger("nostall")
_said: set[str] = set()


def say_once(message: str) -> None:
    """A warning, the first time it is given in this process."""
    if message not in _said:
        _said.add(message)
        _log.warning("nostall: %s", message)
