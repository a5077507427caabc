"""Prefetch hints: a worker loads modules that may come next while the GPU is being timed.

A hint's bytes are in memory that both processes share, so sending a hint never waits for the
worker.  A slot may be overwritten while the worker reads it.  What the worker read then matches no
candidate that is evaluated later, and the worker drops it.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any, Protocol, runtime_checkable

from nostall.core.process import Channel

_SLOTS = 2
"""A step of a search has two possible next candidates: accepted or not."""
_HINT = "prefetch"
_HINT_WAIT_SECONDS = 5e-4
"""Time for which a worker waits for a hint: about one step of a search on the host."""


class PrefetchSlots:
    """Shared memory for the modules of the latest hints."""

    def __init__(self, context: SpawnContext, size: int) -> None:
        """``size``: bytes of a slot; larger modules are not prefetched."""
        self._size = size
        self._memory = context.RawArray(ctypes.c_ubyte, _SLOTS * size)
        self._next = 0

    def write(self, cubin: bytes) -> tuple[Any, ...] | None:
        """Store ``cubin`` and return the hint message for it, or None if it is too large."""
        if len(cubin) > self._size:
            return None
        slot, self._next = self._next, (self._next + 1) % _SLOTS
        offset = slot * self._size
        memoryview(self._memory).cast("B")[offset : offset + len(cubin)] = cubin
        return _HINT, offset, len(cubin)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes that a hint message refers to."""
        return bytes(memoryview(self._memory).cast("B")[offset : offset + length])


class WorkerMessages:
    """Messages to the worker: requests, with hints between them."""

    def __init__(self, channel: Channel, slots: PrefetchSlots) -> None:
        self._channel, self._slots = channel, slots
        self._requests: deque[Any] = deque()

    def next_request(self) -> Any:
        """Wait for the next request; hints before it came too late and are dropped."""
        while not self._requests:
            self._sort(self._channel.receive())
        return self._requests.popleft()

    def next_hint(self) -> bytes | None:
        """The module of the next hint, or None if no hint arrives in time."""
        if not self._channel.poll(_HINT_WAIT_SECONDS):
            return None
        return self._sort(self._channel.receive())

    def _sort(self, message: Any) -> bytes | None:
        if isinstance(message, tuple) and message[0] == _HINT:
            return self._slots.read(*message[1:])
        self._requests.append(message)
        return None


@runtime_checkable
class SupportsPrefetch(Protocol):
    """An evaluator that loads hinted modules; the worker sets ``next_hint``."""

    next_hint: Callable[[], bytes | None]
