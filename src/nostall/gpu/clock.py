"""Clocks that time versions of a graph in interleaved rounds: GPU, CPU or recorded samples."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from nostall.core.errors import BadRun
from nostall.core.measurement import Kind
from nostall.gpu.timing import round_orders

Run = Callable[[], object]
"""Runs one version of a graph once."""
Samples = list[list[float]]
"""Seconds per run: one row for each version."""

MIN_ROUNDS, MAX_ROUNDS = 12, 200
"""Rounds of one comparison."""
WARM_UP_RUNS = 3
MIN_SAMPLE_SECONDS = 1e-3
"""Shorter runs are repeated until a sample takes about this long."""
LOOP_SECONDS = 2e-2
"""The same for runs that the host launches: its times vary more."""
MAX_REPEATS = 1000
RUNS_PER_GRAPH = 8
"""Runs in one captured CUDA graph, because each launch of a graph costs a few microseconds."""


class Clock(Protocol):
    """Times several runs in interleaved rounds."""

    name: str
    kind: Kind

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        """Seconds of each run, the same number of samples for all.

        ``graph``: key of the graph whose versions are timed.  ``seconds``: about how long all
        samples together take.
        """
        ...


class EventClock:
    """Time between CUDA events on the current stream: GPU time, or host time if that is longer.

    A sample repeats the run until about ``sample_seconds`` have passed.  A run that is not timed
    comes first, so that the host is ahead of the GPU, as in a user's loop.
    """

    name = "CUDA events"
    kind: Kind = "measured"

    def __init__(self, sample_seconds: float = LOOP_SECONDS) -> None:
        self._sample_seconds = sample_seconds

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def measure(run: Run, repeats: int) -> float:
            torch.cuda.synchronize()
            run()
            start.record()
            for _ in range(repeats):
                run()
            end.record()
            end.synchronize()
            return 1e-3 * float(start.elapsed_time(end)) / repeats

        return _sample_interleaved(measure, runs, seconds, self._sample_seconds)


class ReplayClock:
    """Time of CUDA graph replays between events: GPU time without the host's.

    Runs must not allocate memory.  Inputs and outputs stay in the L2 cache if they fit.
    """

    name = "CUDA graphs"
    kind: Kind = "measured"

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        return self._replayed(graph, runs, seconds, RUNS_PER_GRAPH)

    def _replayed(self, graph: str, runs: Sequence[Run], seconds: float, count: int) -> Samples:
        stream = torch.cuda.Stream()  # PyTorch caches memory by stream
        replays = [capture(run, count, stream).replay for run in runs]
        samples = EventClock(MIN_SAMPLE_SECONDS).samples(graph, replays, seconds)
        return [[sample / count for sample in row] for row in samples]


class StepReplayClock(ReplayClock):
    """The same for whole steps, which may allocate memory; a graph of a long one has one run.

    Raises whatever PyTorch raises for steps that cannot be captured, such as those that wait.
    """

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[0]()
        end.record()
        end.synchronize()
        is_long = 1e-3 * float(start.elapsed_time(end)) > MIN_SAMPLE_SECONDS
        return self._replayed(graph, runs, seconds, 1 if is_long else RUNS_PER_GRAPH)


def capture(
    run: Run, runs: int = RUNS_PER_GRAPH, stream: torch.cuda.Stream | None = None
) -> torch.cuda.CUDAGraph:
    """Capture so many runs as a CUDA graph, on a stream (by default a new one).

    Unlike ``torch.cuda.graph`` this frees no cached memory, and other threads may call CUDA
    meanwhile (``thread_local`` capture mode).  Behind a capture that fails the allocator and the
    random generator work as before.
    """
    stream, graph = stream or torch.cuda.Stream(), torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compile and load outside the capture
        stream.synchronize()
        with _own_random_state(stream.device.index):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for _ in range(runs):
                    run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                with contextlib.suppress(RuntimeError, AttributeError):  # if it has not ended
                    torch._C._cuda_endAllocateToPool(stream.device.index, pool)
                raise
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


@contextlib.contextmanager
def _own_random_state(device: int) -> Iterator[None]:
    """A copy of the generator's state, which replays draw from.

    A state stays in capture mode behind a capture that fails, and then draws nothing outside.  In
    the capture no other thread can draw from the generator: PyTorch raises an error there, as in
    any capture.  So this holds for no longer than the capture.
    """
    generator = torch.cuda.default_generators[device]
    state = generator.graphsafe_get_state()
    generator.graphsafe_set_state(generator.clone_state())
    try:
        yield
    finally:
        generator.graphsafe_set_state(state)


class WallClock:
    """Wall-clock time, for runs on the CPU."""

    name = "wall time"
    kind: Kind = "measured"

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        def measure(run: Run, repeats: int) -> float:
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            return (time.perf_counter() - start) / repeats

        return _sample_interleaved(measure, runs, seconds)


class RecordedClock:
    """Replays recorded samples, for machines without a GPU."""

    name = "recorded"
    kind: Kind = "measured"

    def __init__(self, samples: Mapping[str, Samples]) -> None:
        """``samples``: by key of the graph; ``*`` stands for all graphs that are not listed."""
        self._samples = samples

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        samples = self._samples.get(graph) or self._samples.get("*")
        if samples is None or len(samples) != len(runs):
            raise BadRun(
                f"the recording has no samples of {len(runs)} versions of graph {graph[:12]}; "
                "record it with this model, these shapes and this version of nostall"
            )
        return samples


def _sample_interleaved(
    measure: Callable[[Run, int], float],
    runs: Sequence[Run],
    seconds: float,
    sample_seconds: float = MIN_SAMPLE_SECONDS,
) -> Samples:
    """Sample all runs in interleaved rounds, for about ``seconds``.

    ``measure(run, repeats)`` returns seconds per run.  Each sample is preceded by an untimed run of
    the same version, as in a loop: otherwise the caches would hold the data of another version.
    """
    for run in runs:
        for _ in range(WARM_UP_RUNS):
            run()
    longest = max(measure(run, 1) for run in runs)
    repeats = max(1, min(MAX_REPEATS, int(sample_seconds / max(longest, 1e-7))))
    rounds = int(seconds / max(longest * (1 + repeats) * len(runs), 1e-9))
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, rounds))
    samples: Samples = [[] for _ in runs]
    for order in round_orders(len(runs), rounds):
        for index in order:
            runs[index]()
            samples[index].append(measure(runs[index], repeats))
    return samples
