"""Times of several versions of one chain, side by side under CUDA graphs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.programs import Chain
from nostall.core.measurement import Comparison

COLD_BYTES = 256 << 20
"""Bytes that one CUDA graph walks over: an H200 has 50 MB of L2."""
MOST_COPIES = 32
LEAST_RUNS = 24
"""Of one CUDA graph: that it begins and ends takes time, too, which is none of a run's."""
WARM_UP = 3

Inputs = Sequence[Tensor]
Run = Callable[[Inputs], object]


@dataclass(frozen=True)
class Method:
    """A version of a chain.  ``overwrites``: results lie where inputs were, so it gets its own."""

    run: Run
    overwrites: bool = False


def copies(chain: Chain) -> int:
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in chain.inputs)
    return max(1, min(MOST_COPIES, -(-COLD_BYTES // size)))


def walked(sets: Sequence[Inputs]) -> list[Inputs]:
    """What one CUDA graph runs over: all sets, again and again until there are enough runs."""
    return [*sets] * -(-LEAST_RUNS // len(sets))


def captured_graph(run: Run, sets: Sequence[Inputs]) -> torch.cuda.CUDAGraph:
    """One CUDA graph that runs over all sets of inputs; outputs live in its own pool."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            run(sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for inputs in sets:
            run(inputs)
    return graph


def replayed(graph: torch.cuda.CUDAGraph, runs: int) -> float:
    """Microseconds for one run of one replay."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / runs


def quickly(run: Run, sets: Sequence[Inputs]) -> float:
    """Microseconds of a run, to choose among versions; what is chosen is timed again."""
    every = walked(sets)
    graph = captured_graph(run, every)
    return statistics.median(replayed(graph, len(every)) for _ in range(15))


def own_copies(method: Method, sets: Sequence[Inputs]) -> Sequence[Inputs]:
    return [[x.clone() for x in one] for one in sets] if method.overwrites else sets


def in_turns(
    methods: Mapping[str, Method],
    sets: Sequence[Inputs],
    rounds: int,
    record: Callable[[Run, Sequence[Inputs]], Any] = captured_graph,
    timed: Callable[[Any, int], float] = replayed,
    loads: int = 1,
) -> dict[str, list[float]]:
    """Microseconds of each method in every round; another method is first each time.

    Where memory lies is worth something, too: it is laid out anew for each of ``loads`` equal parts
    of the rounds.
    """
    samples: dict[str, list[float]] = {name: [] for name in methods}
    draw = random.Random(0)
    for load in range(loads):
        elsewhere = _pads(draw) if load else []
        given = [[x.clone() for x in one] for one in sets] if load else sets
        for name, times in _rounds(methods, given, rounds // loads, record, timed).items():
            samples[name] += times
        del given, elsewhere
    return samples


def _pads(draw: random.Random) -> list[Tensor]:
    """Memory that is taken, so that what comes next lies elsewhere."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [torch.empty(draw.randrange(1, 64) << 20, dtype=torch.uint8, device=device)]


def _rounds(
    methods: Mapping[str, Method],
    sets: Sequence[Inputs],
    rounds: int,
    record: Callable[[Run, Sequence[Inputs]], Any],
    timed: Callable[[Any, int], float],
) -> dict[str, list[float]]:
    # Graphs only know where their inputs are: these have to stay.
    given = {name: own_copies(method, sets) for name, method in methods.items()}
    graphs = {name: record(method.run, walked(given[name])) for name, method in methods.items()}
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for round_ in range(rounds + WARM_UP):
        first = round_ % len(methods)
        for name in [*list(methods)[first:], *list(methods)[:first]]:
            time = timed(graphs[name], len(walked(sets)))
            if round_ >= WARM_UP:
                samples[name].append(round(time, 4))
    return samples


def compared(samples: Mapping[str, Sequence[float]], loads: int = 1) -> dict[str, Any]:
    """Stitched against each other method; the null is eager beside itself.  ``loads`` as in
    :func:`in_turns`."""
    found = {}
    for name in samples:
        if name in ("stitched", "eager again"):
            continue
        # The null is a pair of one method; its spread is carried over to the other ratios.
        scale = [b / a for a, b in zip(samples["eager"], samples["eager again"], strict=True)]
        null = [x * s for x, s in zip(samples[name], scale, strict=True)]
        result = Comparison.from_samples(
            samples[name], samples["stitched"], null, kind="measured", loads=loads
        )
        found[name] = {
            "ratio": round(result.ratio, 4),
            "low": round(result.low, 4),
            "high": round(result.high, 4),
            "verdict": result.verdict,
        }
    return found
