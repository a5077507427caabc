"""Pause Python's cyclic garbage collector while many long-lived objects are allocated."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_paused: ContextVar[bool] = ContextVar("paused", default=False)


@contextmanager
def paused() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the block.

    For code that allocates many objects and keeps them all: repeated collections take about an
    eighth of the time there and free nothing.  Does nothing if the collector is disabled already.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    token = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(token)
        gc.enable()


@contextmanager
def paused_then_promoted() -> Iterator[None]:
    """As :func:`paused`, then move all tracked objects to the oldest generation, unscanned.

    For work that a process does once.  Promoted garbage is freed late, because the oldest
    generation is seldom collected, so do not use this in a loop.
    """
    if gc.isenabled():
        gc.collect(1)  # free young garbage, which may hold tensors, before it is promoted
    with paused():
        yield
        # gc.freeze + gc.unfreeze promotes objects without scanning them.  Skipped if the user's
        # process has frozen objects, because unfreeze would undo that.
        if _paused.get() and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()


def resume() -> None:
    """End the current context's pause early, before work that takes long and makes garbage."""
    if _paused.get():
        _paused.set(False)
        gc.enable()
