"""Interleaved timing of a candidate beside the original: the clocks that need events only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from nostall.core.launch import LaunchSpec
from nostall.gpu.driver import Arguments, Cuda, Loaded

_FLUSH_FACTOR = 2
"""Bytes overwritten for a cold cache, in sizes of the L2 cache."""


class Timer(Protocol):
    """Times kernels side by side."""

    def pairs(self, kernels: Sequence[Loaded], rounds: int) -> list[list[float]]:
        """Seconds per launch of each kernel, ``rounds`` samples each, taken in turns.

        Each round runs the kernels in another order, so that none always follows the same one.
        """
        ...


class GraphTimer:
    """Times graphs of several launches: the L2 cache stays warm and launches do not wait for the
    host.  ``times`` launches make one graph.  The graph of ``reference`` is kept: it takes part in
    every comparison.  ``meanwhile`` is called when all of them are on their way."""

    def __init__(
        self,
        cuda: Cuda,
        spec: LaunchSpec,
        arguments: Arguments,
        times: int,
        reference: Loaded,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self.cuda, self.spec, self.arguments, self.times = cuda, spec, arguments, times
        self.meanwhile = meanwhile
        self.events = [cuda.event() for _ in range(2)]
        self.reference = reference
        self._kept = cuda.graph(reference, spec, arguments, times)

    def pairs(self, kernels: Sequence[Loaded], rounds: int) -> list[list[float]]:
        """As :meth:`Timer.pairs`."""
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
        order = turns(len(graphs), rounds)
        at = 0
        for turn in order:
            self.cuda.record(self.events[at])
            for which in turn:
                self.cuda.replay(graphs[which])
                at += 1
                self.cuda.record(self.events[at])
            at += 1
        if self.meanwhile is not None:
            self.meanwhile()
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


class EventTimer:
    """Times ``times`` launches at once, sent by the host: what a program without graphs pays."""

    def __init__(self, cuda: Cuda, spec: LaunchSpec, arguments: Arguments, times: int) -> None:
        self.cuda, self.spec, self.arguments, self.times = cuda, spec, arguments, times

    def pairs(self, kernels: Sequence[Loaded], rounds: int) -> list[list[float]]:
        """As :meth:`Timer.pairs`."""
        start, end = self.cuda.event(), self.cuda.event()
        samples: list[list[float]] = [[] for _ in kernels]
        for kernel in kernels:
            self.cuda.launch(kernel, self.spec, self.arguments)
        for turn in turns(len(kernels), rounds):
            for which in turn:
                self.cuda.record(start)
                for _ in range(self.times):
                    self.cuda.launch(kernels[which], self.spec, self.arguments)
                self.cuda.record(end)
                self.cuda.synchronize()
                samples[which].append(self.cuda.seconds(start, end) / self.times)
        return samples


class ColdTimer:
    """Times single launches, each after the L2 cache was overwritten."""

    def __init__(self, cuda: Cuda, spec: LaunchSpec, arguments: Arguments, flush: Flush) -> None:
        self.cuda, self.spec, self.arguments, self.flush = cuda, spec, arguments, flush

    def pairs(self, kernels: Sequence[Loaded], rounds: int) -> list[list[float]]:
        """As :meth:`Timer.pairs`."""
        samples: list[list[float]] = [[] for _ in kernels]
        start, end = self.cuda.event(), self.cuda.event()
        for turn in turns(len(kernels), rounds):
            for which in turn:
                self.flush()
                self.cuda.record(start)
                self.cuda.launch(kernels[which], self.spec, self.arguments)
                self.cuda.record(end)
                self.cuda.synchronize()
                samples[which].append(self.cuda.seconds(start, end))
        return samples


class Flush:
    """Overwrites the L2 cache."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.size = _FLUSH_FACTOR * cuda.attribute("L2_CACHE_SIZE")
        self._scratch: int | None = None
        self._byte = 0

    def __call__(self) -> None:
        if self._scratch is None:
            self._scratch = self.cuda.allocate(self.size)
        self._byte = (self._byte + 1) & 0xFF
        self.cuda.fill(self._scratch, self._byte, self.size)


def turns(kernels: int, rounds: int) -> list[list[int]]:
    """Who runs when: each round rotates the order, every other cycle of rounds goes backwards."""
    order: list[list[int]] = []
    for number in range(rounds):
        turn = [(number + k) % kernels for k in range(kernels)]
        order.append(turn if number // kernels % 2 == 0 else turn[::-1])
    return order


def launches_for(seconds: float, batch_us: float) -> int:
    """How many launches of ``seconds`` fill a graph of ``batch_us`` microseconds (1 to 200)."""
    return int(np.clip(round(batch_us * 1e-6 / max(seconds, 1e-7)), 1, 200))
