"""Timers that measure a candidate and the original in interleaved rounds, with CUDA events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from nostall.core.launch import LaunchSpec
from nostall.gpu.driver import Cuda, KernelArguments, LoadedKernel

_FLUSH_FACTOR = 2
"""Bytes overwritten to make the L2 cache cold, as a multiple of its size."""


class Timer(Protocol):
    """Times several kernels in interleaved rounds."""

    def time_interleaved(self, kernels: Sequence[LoadedKernel], rounds: int) -> list[list[float]]:
        """Seconds per launch of each kernel, ``rounds`` samples each.

        Each round runs all kernels, in the order of :func:`round_orders`.
        """
        ...


class GraphTimer:
    """Times CUDA graphs of several launches: a warm L2 cache, and no waiting for the host."""

    def __init__(
        self,
        cuda: Cuda,
        spec: LaunchSpec,
        arguments: KernelArguments,
        launches: int,
        reference: LoadedKernel,
        while_busy: Callable[[], None] | None = None,
    ) -> None:
        """Build the graph of ``reference``, which is reused in every comparison.

        ``launches``: launches in one graph.  ``while_busy`` is called after all graphs are
        submitted, while the GPU runs them.
        """
        self.cuda, self.spec, self.arguments, self.launches = cuda, spec, arguments, launches
        self.while_busy = while_busy
        self.events = [cuda.event() for _ in range(2)]
        self.reference = reference
        self._reference_graph = cuda.graph(reference, spec, arguments, launches)

    def time_interleaved(self, kernels: Sequence[LoadedKernel], rounds: int) -> list[list[float]]:
        """As :meth:`Timer.time_interleaved`."""
        graphs = [
            self._reference_graph
            if kernel is self.reference
            else self.cuda.graph(kernel, self.spec, self.arguments, self.launches)
            for kernel in kernels
        ]
        needed = rounds * (len(graphs) + 1)
        while len(self.events) < needed:
            self.events.append(self.cuda.event())
        for graph in graphs:
            self.cuda.replay(graph)
        orders = round_orders(len(graphs), rounds)
        event = 0
        for order in orders:
            self.cuda.record(self.events[event])
            for index in order:
                self.cuda.replay(graphs[index])
                event += 1
                self.cuda.record(self.events[event])
            event += 1
        if self.while_busy is not None:
            self.while_busy()
        self.cuda.synchronize()
        samples: list[list[float]] = [[] for _ in graphs]
        event = 0
        for order in orders:
            for index in order:
                elapsed = self.cuda.seconds(self.events[event], self.events[event + 1])
                samples[index].append(elapsed / self.launches)
                event += 1
            event += 1
        for graph in graphs:
            if graph is not self._reference_graph:
                self.cuda.destroy_graph(graph)
        return samples


class EventTimer:
    """Times ``launches`` launches sent one by one by the host, as a program without graphs does."""

    def __init__(
        self, cuda: Cuda, spec: LaunchSpec, arguments: KernelArguments, launches: int
    ) -> None:
        self.cuda, self.spec, self.arguments, self.launches = cuda, spec, arguments, launches

    def time_interleaved(self, kernels: Sequence[LoadedKernel], rounds: int) -> list[list[float]]:
        """As :meth:`Timer.time_interleaved`."""
        start, end = self.cuda.event(), self.cuda.event()
        samples: list[list[float]] = [[] for _ in kernels]
        for kernel in kernels:
            self.cuda.launch(kernel, self.spec, self.arguments)
        for order in round_orders(len(kernels), rounds):
            for index in order:
                self.cuda.record(start)
                for _ in range(self.launches):
                    self.cuda.launch(kernels[index], self.spec, self.arguments)
                self.cuda.record(end)
                self.cuda.synchronize()
                samples[index].append(self.cuda.seconds(start, end) / self.launches)
        return samples


class ColdTimer:
    """Times single launches, each after the L2 cache was overwritten."""

    def __init__(
        self, cuda: Cuda, spec: LaunchSpec, arguments: KernelArguments, flush: L2Flush
    ) -> None:
        self.cuda, self.spec, self.arguments, self.flush = cuda, spec, arguments, flush

    def time_interleaved(self, kernels: Sequence[LoadedKernel], rounds: int) -> list[list[float]]:
        """As :meth:`Timer.time_interleaved`."""
        samples: list[list[float]] = [[] for _ in kernels]
        start, end = self.cuda.event(), self.cuda.event()
        for order in round_orders(len(kernels), rounds):
            for index in order:
                self.flush()
                self.cuda.record(start)
                self.cuda.launch(kernels[index], self.spec, self.arguments)
                self.cuda.record(end)
                self.cuda.synchronize()
                samples[index].append(self.cuda.seconds(start, end))
        return samples


class L2Flush:
    """Makes the L2 cache cold by overwriting more memory than it holds."""

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


def round_orders(kernels: int, rounds: int) -> list[list[int]]:
    """The order of the kernels (by index) in each round, so that none always follows the same one.

    Each round rotates the order by one.  After ``kernels`` rounds the orders are reversed, after
    ``kernels`` further rounds they are reversed back, and so on.
    """
    orders: list[list[int]] = []
    for number in range(rounds):
        order = [(number + k) % kernels for k in range(kernels)]
        orders.append(order if number // kernels % 2 == 0 else order[::-1])
    return orders


def launches_per_sample(seconds: float, batch_us: float) -> int:
    """Launches of ``seconds`` each that fill a sample of ``batch_us`` microseconds (1 to 200)."""
    return int(np.clip(round(batch_us * 1e-6 / max(seconds, 1e-7)), 1, 200))
