"""Slower links than a machine has, to try plans for other clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import sleep
from typing import Any

import torch

_CYCLES = 20_000_000


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """A boundary between stages passes ``bytes_per_s`` in each direction, one micro-batch after
    another, each after ``latency_s``; so does a link of the ring of an all-reduce."""

    bytes_per_s: float
    latency_s: float = 0.0

    def message_s(self, size: float) -> float:
        """Seconds of a message of so many bytes."""
        return self.latency_s + size / self.bytes_per_s

    def allreduce_s(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce: 2 (r - 1) steps of size / r bytes."""
        return 2 * (ranks - 1) * self.message_s(size / ranks)


class Delays:
    """Begins messages late.

    On a GPU the delay runs on a stream of its own for each use, and computing goes on; on a
    processor the sender sleeps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, Any] = {}
        self._cycles_per_s = _cycles_per_s(device)

    def late(
        self, use: str, seconds: float, tensors: Sequence[torch.Tensor], begin: Callable[[], Any]
    ) -> Any:
        """What ``begin`` returns, called so that its message waits first."""
        if self.device.type != "cuda":
            sleep(seconds)
            return begin()
        if use not in self._streams:
            self._streams[use] = torch.cuda.Stream(self.device)
        stream = self._streams[use]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
            for tensor in tensors:
                tensor.record_stream(stream)
            return begin()


def _cycles_per_s(device: torch.device) -> float:
    """What one second is on the clock that ``torch.cuda._sleep`` counts."""
    if device.type != "cuda":
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES)
    start.record()
    torch.cuda._sleep(_CYCLES)
    end.record()
    torch.cuda.synchronize(device)
    return _CYCLES / (float(start.elapsed_time(end)) * 1e-3)
