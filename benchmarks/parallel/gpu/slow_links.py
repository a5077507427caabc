"""Emulation of slow links: messages between ranks start late, as if the links were slower.

The engine ``p2p`` sends by ``dist.batch_isend_irecv`` and sums gradients by ``dist.all_reduce``
with ``async_op``; both are replaced for the time of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

_CALIBRATION_CYCLES = 20_000_000


@dataclass(frozen=True, slots=True)
class SlowLinks:
    """Speed of the emulated links: stage boundaries in each direction, and links of a ring.

    A link passes one message after another.
    """

    bytes_per_s: float
    latency_s: float = 0.0

    def message_s(self, size: float) -> float:
        """Seconds of a message of ``size`` bytes."""
        return self.latency_s + size / self.bytes_per_s

    def allreduce_s(self, size: float, ranks: int) -> float:
        """Seconds of a ring all-reduce: 2 (r - 1) steps of size / r bytes."""
        return 2 * (ranks - 1) * self.message_s(size / ranks)


@contextmanager
def emulated(links: SlowLinks, device: torch.device) -> Iterator[None]:
    """Let messages and all-reduces of gradients take the time of slow links."""
    delays, send, reduce = MessageDelays(device), dist.batch_isend_irecv, dist.all_reduce

    def batch(operations: list[Any]) -> Any:
        if operations[0].op is not dist.isend:
            return send(operations)
        tensors = [operation.tensor for operation in operations]
        seconds = links.message_s(sum(t.nbytes for t in tensors))
        use = f"messages of {id(operations[0].group)}"
        return delays.start_late(use, seconds, tensors, lambda: list(send(operations)))

    def all_reduce(tensor: torch.Tensor, *given: Any, **named: Any) -> Any:
        if not named.get("async_op"):
            return reduce(tensor, *given, **named)
        seconds = links.allreduce_s(tensor.nbytes, dist.get_world_size(named["group"]))
        start = partial(reduce, tensor, *given, **named)
        return delays.start_late("gradients", seconds, [tensor], start)

    with (
        patch.object(dist, "batch_isend_irecv", batch),
        patch.object(dist, "all_reduce", all_reduce),
    ):
        yield


class MessageDelays:
    """Starts messages after a delay.

    On a GPU each use has its own CUDA stream, which holds the delay, so computation continues.  On
    a CPU the sending process sleeps.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams: dict[str, Any] = {}
        self._cycles_per_s = _gpu_cycles_per_s(device)

    def start_late(
        self, use: str, seconds: float, tensors: Sequence[torch.Tensor], start: Callable[[], Any]
    ) -> Any:
        """Call ``start``, which sends ``tensors``, so that the message begins ``seconds`` later.

        ``use`` names the link; messages of one use are delayed one after another.  Returns the
        result of ``start``.
        """
        if self.device.type != "cuda":
            sleep(seconds)
            return start()
        if use not in self._streams:
            self._streams[use] = torch.cuda.Stream(self.device)
        stream = self._streams[use]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(seconds * self._cycles_per_s))
            for tensor in tensors:
                tensor.record_stream(stream)
            return start()


def _gpu_cycles_per_s(device: torch.device) -> float:
    """Measured frequency of the clock that ``torch.cuda._sleep`` counts; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    start.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    torch.cuda.synchronize(device)
    return _CALIBRATION_CYCLES / (float(start.elapsed_time(end)) * 1e-3)
