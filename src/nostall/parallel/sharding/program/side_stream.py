"""Redistributions beside the operators: on a second CUDA stream, or at once on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

from nostall.parallel.sharding.program.devices import Values

T = TypeVar("T")


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all programs on a GPU: PyTorch keeps free memory for each stream apart.

    Its kernels come before those of the main stream that did not start yet.
    """
    return torch.cuda.Stream(device, priority=-1)


class SideStream:
    """Runs work beside the current CUDA stream, one piece after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream(device) if device.type == "cuda" else None

    def start(self, work: Callable[[], T], sources: Values) -> Callable[[], T]:
        """Start work on ``sources``; the returned function waits for it and gives its results."""
        if self._stream is None:
            results = work()
            return lambda: results
        device = self._stream.device
        main = torch.cuda.current_stream(device)
        # The wait also makes the memory of earlier results safe to use again: operators that read
        # them come before it on the main stream.
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream):
            results = work()
            done = self._stream.record_event()
        for source in sources:
            source.record_stream(self._stream)

        def wait() -> T:
            torch.cuda.current_stream(device).wait_event(done)
            return results

        return wait
