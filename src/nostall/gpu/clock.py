"""Interleaved times of versions of one thing: a GPU's, a processor's, or recorded ones."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from nostall.core.errors import BadRun
from nostall.core.measurement import Kind
from nostall.gpu.timing import turns

Run = Callable[[], object]
Samples = list[list[float]]


class Clock(Protocol):
    """Times runs side by side."""

    name: str
    kind: Kind

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        """Seconds of each run, equally many samples each, taken in turns; about ``seconds`` in
        all.  ``graph`` is the name of what is timed."""
        ...


FEWEST, MOST = 12, 200
"""Rounds of one comparison."""
WARM_UP = 3
SHORTEST = 1e-3
"""Seconds below which a sample is made of several runs in a row."""


LAUNCHES = 8
"""Runs in one captured graph: starting it costs a few microseconds."""


class EventClock:
    """Between CUDA events on the current stream: what the GPU takes, or the host, where that is
    longer."""

    name = "CUDA events"
    kind: Kind = "measured"

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def timed(run: Run, times: int) -> float:
            torch.cuda.synchronize()
            start.record()
            for _ in range(times):
                run()
            end.record()
            end.synchronize()
            return 1e-3 * float(start.elapsed_time(end)) / times

        return _in_turns(timed, runs, seconds)


class ReplayClock:
    """Replays of CUDA graphs between events: what the GPU takes, whatever the host does.

    Runs may not allocate memory.  Inputs and outputs stay in L2 where they fit."""

    name = "CUDA graphs"
    kind: Kind = "measured"

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        replays = [_captured(run).replay for run in runs]
        found = EventClock().samples(graph, replays, seconds)
        return [[sample / LAUNCHES for sample in one] for one in found]


def _captured(run: Run) -> torch.cuda.CUDAGraph:
    """``LAUNCHES`` runs as a graph.  Unlike ``torch.cuda.graph`` it gives no memory back to the
    driver, and other threads may do what they like meanwhile."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # what is compiled or loaded at the first call
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(LAUNCHES):
                run()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


class WallClock:
    """On a processor."""

    name = "wall time"
    kind: Kind = "measured"

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        def timed(run: Run, times: int) -> float:
            began = time.perf_counter()
            for _ in range(times):
                run()
            return (time.perf_counter() - began) / times

        return _in_turns(timed, runs, seconds)


class RecordedClock:
    """Plays samples back, by the name of the graph: a device for machines without one.  ``*``
    stands for every graph that has no samples of its own."""

    name = "recorded"
    kind: Kind = "measured"

    def __init__(self, samples: Mapping[str, Samples]) -> None:
        self._samples = samples

    @classmethod
    def of(cls, path: Path) -> RecordedClock:
        try:
            return cls(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise BadRun(f"{path} is no recording of graphs: {error}; record it anew") from error

    def samples(self, graph: str, runs: Sequence[Run], seconds: float) -> Samples:
        found = self._samples.get(graph) or self._samples.get("*")
        if found is None or len(found) != len(runs):
            raise BadRun(
                f"the recording has no samples of {len(runs)} versions of graph {graph[:12]}; "
                "record it with this model, these shapes and this version of nostall"
            )
        return found


def _in_turns(timed: Callable[[Run, int], float], runs: Sequence[Run], seconds: float) -> Samples:
    """Every sample has a run of its own before it, as in a loop: whoever comes behind another
    program finds its caches cold, and who comes behind itself does not."""
    for run in runs:
        for _ in range(WARM_UP):
            run()
    longest = max(timed(run, 1) for run in runs)
    times = max(1, min(50, int(SHORTEST / max(longest, 1e-7))))
    rounds = int(seconds / max(longest * (1 + times) * len(runs), 1e-9))
    rounds = max(FEWEST, min(MOST, rounds))
    found: Samples = [[] for _ in runs]
    for turn in turns(len(runs), rounds):
        for which in turn:
            runs[which]()
            found[which].append(timed(runs[which], times))
    return found
