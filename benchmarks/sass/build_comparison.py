"""Time several builds of one kernel side by side on a GPU.

Schedules of one binary share a launch; builds with other compiler options differ in grid, block and
shared memory. All builds get the same buffers, and their launches are interleaved. The timing runs
in a process of its own, because a build that faults makes the CUDA context unusable.
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
from nostall.gpu.driver import Cuda, DriverError, KernelArguments, LoadedKernel
from nostall.gpu.evaluator.checking import Buffers
from nostall.gpu.timing import launches_per_sample
from nostall.tuning.sources.source import Source

FEW_ROUNDS, MANY_ROUNDS, FINALISTS = 5, 40, 4
"""Rounds for each build, rounds for the fastest builds, and the number of these."""
_BATCH_US = 150.0
"""Microseconds of one sample, which consists of several launches."""
_HARMLESS = ("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "CUDA_ERROR_INVALID_VALUE")
"""Errors of a launch that leave the context usable."""


class BuildTimer(Protocol):
    """Measures microseconds per launch of each build, or returns why it did not run."""

    def __call__(self, sources: Sequence[Source], rounds: int) -> list[float | str]: ...


def time_builds(sources: Sequence[Source], times: BuildTimer) -> list[float | str]:
    """Time each build alone with few rounds, then the fastest together with many rounds.

    Returns microseconds per launch by build, or an error text; the later time replaces the first.
    """
    results = [times([source], FEW_ROUNDS)[0] for source in sources]
    ran = [(us, number) for number, us in enumerate(results) if isinstance(us, float)]
    best = [number for _, number in sorted(ran)[:FINALISTS]]
    if len(best) < 2:
        return results
    for number, us in zip(best, times([sources[n] for n in best], MANY_ROUNDS), strict=True):
        results[number] = us
    return results


class ProcessTimer:
    """A BuildTimer that runs in a child process and starts a new one after a fault."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, sources: Sequence[Source], rounds: int) -> list[float | str]:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context)
        try:
            return self._pool.submit(_time_in_process, tuple(sources), rounds).result()
        except (BrokenProcessPool, NostallError) as error:
            self.close()
            message = " ".join(str(error).split())[:200] or type(error).__name__
            return [message] * len(sources)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> ProcessTimer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class _LoadedBuild:
    """A build on the GPU, and a CUDA graph of several launches."""

    loaded: LoadedKernel
    graph: Any
    launches: int


class _Timer:
    """Times builds on the GPU of this process, with shared buffers."""

    def __init__(self) -> None:
        self.cuda = Cuda()
        self._buffers: tuple[tuple[Buffer, ...], Buffers] | None = None

    def times(self, sources: Sequence[Source], rounds: int) -> list[float | str]:
        """Median microseconds per launch of each build; the builds alternate within a round."""
        builds = [self._load(source) for source in sources]
        samples: list[list[float]] = [[] for _ in builds]
        start, end = self.cuda.event(), self.cuda.event()
        for number in range(rounds):
            for k in range(len(builds)):
                which = (number + k) % len(builds)
                samples[which].append(self._replay(builds[which], start, end))
        for build in builds:
            self.cuda.destroy_graph(build.graph)
            self.cuda.unload(build.loaded)
        return [round(float(np.median(s)) * 1e6, 4) for s in samples]

    def _load(self, source: Source) -> _LoadedBuild:
        assert source.launch is not None
        loaded = self.cuda.load(source.cubin, source.kernel, source.launch.shared)
        buffers = self._shared_buffers(source)
        num_passed = sum(not hasattr(a, "constant") for a in source.launch.args)
        extra = self.cuda.missing_parameters(loaded, num_passed)
        arguments = KernelArguments.pack(source.launch, buffers.pointers, extra)
        buffers.reset(0)
        self.cuda.launch(loaded, source.launch, arguments)
        self.cuda.synchronize()
        probe = self.cuda.graph(loaded, source.launch, arguments, 5)
        build, events = _LoadedBuild(loaded, probe, 5), (self.cuda.event(), self.cuda.event())
        seconds = min(self._replay(build, *events) for _ in range(3))
        self.cuda.destroy_graph(probe)
        launches = launches_per_sample(seconds, _BATCH_US)
        graph = self.cuda.graph(loaded, source.launch, arguments, launches)
        build = _LoadedBuild(loaded, graph, launches)
        self._replay(build, *events)
        return build

    def _replay(self, build: _LoadedBuild, start: Any, end: Any) -> float:
        """Seconds per launch of one replay."""
        self.cuda.record(start)
        self.cuda.replay(build.graph)
        self.cuda.record(end)
        self.cuda.synchronize()
        return self.cuda.seconds(start, end) / build.launches

    def _shared_buffers(self, source: Source) -> Buffers:
        """Buffers for this launch; those of the last build if the arguments are the same."""
        assert source.launch is not None
        specs = tuple(a for a in source.launch.args if isinstance(a, Buffer))
        if self._buffers is None or self._buffers[0] != specs:
            if self._buffers is not None:
                self._buffers[1].release()
            buffers = Buffers(self.cuda, source.launch, 1, 0, None)
            buffers.set_sample(0)
            buffers.generate_inputs(0)
            self._buffers = (specs, buffers)
        return self._buffers[1]


_timer: _Timer | None = None


def _time_in_process(sources: Sequence[Source], rounds: int) -> list[float | str]:
    global _timer
    if _timer is None:
        _timer = _Timer()
    try:
        return _timer.times(sources, rounds)
    except DriverError as error:
        if error.name in _HARMLESS:
            return [str(error)] * len(sources)
        raise NostallError(str(error)) from error
