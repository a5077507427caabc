"""Times calls in CUDA graphs, in interleaved rounds, with buffers that rotate between calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch


class GraphedCalls:
    """Calls captured one after the other in one CUDA graph."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        self.calls = len(calls)
        # The graph holds addresses only: the calls keep the tensors that it reads.
        self.kept = tuple(calls)
        if not torch.cuda.is_available():
            self.replay: Callable[[], object] = lambda: [call() for call in calls]
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                for call in calls:
                    call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()
        self.replay = self.graph.replay
        self.replay()
        torch.cuda.synchronize()


def interleaved_us(
    graphs: Mapping[str, GraphedCalls], rounds: int, seconds: float
) -> dict[str, list[float]]:
    """Microseconds a call of each graph, one sample a round; the order rotates between rounds.

    Stops after ``seconds``, but not before 5 rounds.
    """
    names = list(graphs)
    samples: dict[str, list[float]] = {name: [] for name in names}
    if not torch.cuda.is_available():
        return {name: [_wall_us(graphs[name])] for name in names}
    begin = time.monotonic()
    for turn in range(rounds):
        shift = turn % len(names)
        events = []
        for name in names[shift:] + names[:shift]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            events.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in events:
            samples[name].append(start.elapsed_time(end) * 1e3 / graphs[name].calls)
        if turn >= 4 and time.monotonic() - begin > seconds:
            break
    return samples


def _wall_us(graph: GraphedCalls) -> float:
    """Microseconds a call by the host's clock, for runs without a GPU."""
    begin = time.perf_counter()
    graph.replay()
    return (time.perf_counter() - begin) * 1e6 / graph.calls
