"""Several builds of one kernel timed against each other: other binaries, other launches.

A search compares schedules of one binary, which share a launch; compiler configurations differ in
grid, block and shared memory.  They get the same buffers and are timed in turns.  Runs in a process
of its own, because a build that faults ends it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from nostall.core import NostallError
from nostall.core.launch import Buffer
from nostall.gpu.buffers import Buffers
from nostall.gpu.driver import Cuda, DriverError, KernelArguments, LoadedKernel
from nostall.gpu.timing import launches_per_sample
from nostall.tuning.source import Source

QUICK, LONG, FINALISTS = 5, 40, 4
"""Rounds for all, rounds for the fastest of these, and how many those are."""
_BATCH_US = 150.0
_HARMLESS = ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "CUDA_ERROR_INVALID_VALUE")
"""Errors of a launch that leave the context usable."""


class Times(Protocol):
    """What :func:`race` asks: microseconds per launch of each build, or why it did not run."""

    def __call__(self, sources: Sequence[Source], rounds: int) -> list[float | str]: ...


def race(sources: Sequence[Source], times: Times) -> list[float | str]:
    """All builds once and briefly, the fastest again and longer; the last word counts."""
    found = [times([source], QUICK)[0] for source in sources]
    ran = [(us, number) for number, us in enumerate(found) if isinstance(us, float)]
    best = [number for _, number in sorted(ran)[:FINALISTS]]
    if len(best) < 2:
        return found
    for number, us in zip(best, times([sources[n] for n in best], LONG), strict=True):
        found[number] = us
    return found


class Referee:
    """Times builds in a process of its own, and starts a new one when that was lost."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, sources: Sequence[Source], rounds: int) -> list[float | str]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            return self._pool.submit(_times, tuple(sources), rounds).result()
        except (BrokenProcessPool, NostallError) as error:
            self.close()
            said = " ".join(str(error).split())[:200] or type(error).__name__
            return [said] * len(sources)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Referee:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _Entrant:
    loaded: LoadedKernel
    graph: Any
    launches: int


class _Track:
    """The GPU of this process, with the buffers that the builds share."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self._buffers: tuple[tuple[Buffer, ...], Buffers] | None = None

    def times(self, sources: Sequence[Source], rounds: int) -> list[float | str]:
        """Median microseconds per launch, taken in turns."""
        entrants = [self._enter(source) for source in sources]
        samples: list[list[float]] = [[] for _ in entrants]
        start, end = self.cuda.event(), self.cuda.event()
        for number in range(rounds):
            for k in range(len(entrants)):
                which = (number + k) % len(entrants)
                samples[which].append(self._replay(entrants[which], start, end))
        for entrant in entrants:
            self.cuda.destroy_graph(entrant.graph)
            self.cuda.unload(entrant.loaded)
        return [round(float(np.median(s)) * 1e6, 4) for s in samples]

    def _enter(self, source: Source) -> _Entrant:
        assert source.launch is not None
        loaded = self.cuda.load(source.cubin, source.kernel, source.launch.shared)
        buffers = self._shared(source)
        given = sum(not hasattr(a, "constant") for a in source.launch.args)
        extra = self.cuda.missing_parameters(loaded, given)
        arguments = KernelArguments.pack(source.launch, buffers.pointers, extra)
        buffers.reset(0)
        self.cuda.launch(loaded, source.launch, arguments)
        self.cuda.synchronize()
        probe = self.cuda.graph(loaded, source.launch, arguments, 5)
        entrant, events = _Entrant(loaded, probe, 5), (self.cuda.event(), self.cuda.event())
        seconds = min(self._replay(entrant, *events) for _ in range(3))
        self.cuda.destroy_graph(probe)
        launches = launches_per_sample(seconds, _BATCH_US)
        graph = self.cuda.graph(loaded, source.launch, arguments, launches)
        entrant = _Entrant(loaded, graph, launches)
        self._replay(entrant, *events)
        return entrant

    def _replay(self, entrant: _Entrant, start: Any, end: Any) -> float:
        """Seconds per launch of one replay."""
        self.cuda.record(start)
        self.cuda.replay(entrant.graph)
        self.cuda.record(end)
        self.cuda.synchronize()
        return self.cuda.seconds(start, end) / entrant.launches

    def _shared(self, source: Source) -> Buffers:
        """Buffers for this launch; the last ones again where it takes the same."""
        assert source.launch is not None
        wanted = tuple(a for a in source.launch.args if isinstance(a, Buffer))
        if self._buffers is None or self._buffers[0] != wanted:
            if self._buffers is not None:
                self._buffers[1].release()
            buffers = Buffers(self.cuda, source.launch, 1, 0, None)
            buffers.set_sample(0)
            buffers.generate_inputs(0)
            self._buffers = (wanted, buffers)
        return self._buffers[1]


_track: _Track | None = None


def _times(sources: Sequence[Source], rounds: int) -> list[float | str]:
    global _track
    if _track is None:
        _track = _Track()
    try:
        return _track.times(sources, rounds)
    except DriverError as error:
        if error.name in _HARMLESS:
            return [str(error)] * len(sources)
        raise NostallError(str(error)) from error
