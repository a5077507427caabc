"""Python's cyclic garbage collector, paused while something large is built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_paused: ContextVar[bool] = ContextVar("paused", default=False)


@contextmanager
def paused() -> Iterator[None]:
    """For code that makes very many objects which all stay: looking through them again and again
    costs an eighth of the time and finds nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    mark = _paused.set(True)
    try:
        yield
    finally:
        _paused.reset(mark)
        gc.enable()


@contextmanager
def settled() -> Iterator[None]:
    """The same for what a program does once: what was made counts as old then, without a look at
    it.  Often would be too often, as who is old is seldom looked at again."""
    if gc.isenabled():
        gc.collect(1)  # garbage of before, which may hold tensors, does not get old with it
    with paused():
        yield
        # Who keeps objects apart in that way himself would find them among the others.
        if _paused.get() and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()


def resume() -> None:
    """End this thread's pause early: what comes now takes long, and leaves much behind."""
    if _paused.get():
        _paused.set(False)
        gc.enable()
