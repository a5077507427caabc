"""Seconds in which Numba compiled, so that limits on planning do not count them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from time import monotonic
from typing import Any


def compiled_s() -> float:
    """Seconds of compilation in this process since the first call; only differences have a meaning.

    Code that Numba loads from its cache is not compiled.
    """
    return _clock().seconds


def planning_clock() -> float:
    """Seconds of the monotonic clock without those of compilation."""
    compiled = compiled_s()  # the first call imports numba
    return monotonic() - compiled


@dataclass
class _Clock:
    """Compilations that run (nested ones count once), since when, and the seconds of the others."""

    running: int = 0
    began: float = 0.0
    seconds: float = 0.0


@cache
def _clock() -> _Clock:
    from numba.core import event

    clock = _Clock()

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, event: Any) -> None:
            clock.began = clock.began if clock.running else monotonic()
            clock.running += 1

        def on_end(self, event: Any) -> None:
            clock.running -= 1
            clock.seconds += 0.0 if clock.running else monotonic() - clock.began

    event.register("numba:compile", Listener())
    return clock
