"""What may be asked next, told to a worker while it is busy: it loads these modules while the GPU
is being timed.

The bytes lie in memory that both processes share, so telling never waits for the worker.  A slot
may be written anew while it is read: what was read then is no candidate that is ever asked for, and
is dropped.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from typing import Any, Protocol, runtime_checkable

_SLOTS = 2
"""Either end of one step of a search."""
_HINT = "foresee"
_PATIENCE = 5e-4
"""Seconds that a worker waits for a hint: about what a step of a search takes on the host."""


class Slots:
    """Places for the modules that were foreseen last."""

    def __init__(self, context: SpawnContext, size: int) -> None:
        """``size``: bytes of a module; larger ones are not told."""
        self._size = size
        self._memory = context.RawArray(ctypes.c_ubyte, _SLOTS * size)
        self._next = 0

    def hint(self, cubin: bytes) -> tuple[Any, ...] | None:
        """Keep ``cubin`` and make the message that says so; None where it is too large."""
        if len(cubin) > self._size:
            return None
        slot, self._next = self._next, (self._next + 1) % _SLOTS
        at = slot * self._size
        memoryview(self._memory).cast("B")[at : at + len(cubin)] = cubin
        return _HINT, at, len(cubin)

    def read(self, at: int, length: int) -> bytes:
        return bytes(memoryview(self._memory).cast("B")[at : at + length])


class Messages:
    """A worker's end of the pipe: questions one after the other, hints between them."""

    def __init__(self, pipe: Connection, slots: Slots) -> None:
        self._pipe, self._slots = pipe, slots
        self._questions: deque[Any] = deque()

    def question(self) -> Any:
        """The next question; hints that came too late are left out."""
        while not self._questions:
            self._sort(self._pipe.recv())
        return self._questions.popleft()

    def foreseen(self) -> bytes | None:
        """A module that may be asked for next, if one is told by now or soon."""
        return self._sort(self._pipe.recv()) if self._pipe.poll(_PATIENCE) else None

    def _sort(self, message: Any) -> bytes | None:
        if isinstance(message, tuple) and message[0] == _HINT:
            return self._slots.read(*message[1:])
        self._questions.append(message)
        return None


@runtime_checkable
class Foreseeing(Protocol):
    """A worker that prepares what it hears of, from :meth:`Messages.foreseen`."""

    foretold: Callable[[], bytes | None]
