"""Interleaved timing of a candidate beside the original, with CUDA graphs or launch by launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nostall.core.launch import LaunchSpec
from nostall.gpu.driver import Arguments, Cuda, Loaded

_FLUSH_FACTOR = 2
"""Bytes overwritten for a cold cache, in sizes of the L2 cache."""


class GraphTimer:
    """Times graphs of several launches: the L2 cache stays warm and launches do not wait for the
    host.  ``times`` launches make one graph.  The graph of ``reference`` is kept: it takes part in
    every comparison."""

    def __init__(
        self, cuda: Cuda, spec: LaunchSpec, arguments: Arguments, times: int, reference: Loaded
    ) -> None:
        self.cuda, self.spec, self.arguments, self.times = cuda, spec, arguments, times
        self.events = [cuda.event() for _ in range(2)]
        self.reference = reference
        self._kept = cuda.graph(reference, spec, arguments, times)

    def pairs(self, kernels: Sequence[Loaded], rounds: int) -> list[list[float]]:
        """Seconds per launch of each kernel, ``rounds`` samples each, taken in turns.

        Each round runs the kernels in another order, so that none always follows the same one.
        """
        graphs = [
            self._kept
            if kernel is self.reference
            else self.cuda.graph(kernel, self.spec, self.arguments, self.times)
            for kernel in kernels
        ]
        needed = rounds * (len(graphs) + 1)
        while len(self.events) < needed:
            self.events.append(self.cuda.event())
        for graph in graphs:
            self.cuda.replay(graph)
        order: list[list[int]] = []
        at = 0
        for number in range(rounds):
            turn = [(number + k) % len(graphs) for k in range(len(graphs))]
            order.append(turn if number // len(graphs) % 2 == 0 else turn[::-1])
            self.cuda.record(self.events[at])
            for which in order[-1]:
                self.cuda.replay(graphs[which])
                at += 1
                self.cuda.record(self.events[at])
            at += 1
        self.cuda.synchronize()
        samples: list[list[float]] = [[] for _ in graphs]
        at = 0
        for turn in order:
            for which in turn:
                spent = self.cuda.seconds(self.events[at], self.events[at + 1])
                samples[which].append(spent / self.times)
                at += 1
            at += 1
        for graph in graphs:
            if graph is not self._kept:
                self.cuda.drop(graph)
        return samples


class ColdTimer:
    """Times single launches, each after the L2 cache was overwritten."""

    def __init__(self, cuda: Cuda, spec: LaunchSpec, arguments: Arguments) -> None:
        self.cuda, self.spec, self.arguments = cuda, spec, arguments
        self.size = _FLUSH_FACTOR * cuda.attribute("L2_CACHE_SIZE")
        self.flush = cuda.allocate(self.size)

    def pairs(self, kernels: Sequence[Loaded], rounds: int) -> list[list[float]]:
        """As :meth:`GraphTimer.pairs`."""
        samples: list[list[float]] = [[] for _ in kernels]
        start, end = self.cuda.event(), self.cuda.event()
        for number in range(rounds):
            for k in range(len(kernels)):
                which = (number + k) % len(kernels)
                self.cuda.fill(self.flush, number & 0xFF, self.size)
                self.cuda.record(start)
                self.cuda.launch(kernels[which], self.spec, self.arguments)
                self.cuda.record(end)
                self.cuda.synchronize()
                samples[which].append(self.cuda.seconds(start, end))
        return samples


def launches_for(seconds: float, batch_us: float) -> int:
    """How many launches of ``seconds`` fill a graph of ``batch_us`` microseconds (1 to 200)."""
    return int(np.clip(round(batch_us * 1e-6 / max(seconds, 1e-7)), 1, 200))
