"""Interleaved timing of several methods of one chain, each captured as a CUDA graph."""

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
"""Bytes of inputs that one CUDA graph reads, so that they are not in L2 (50 MB on an H200)."""
MAX_COPIES = 32
MIN_RUNS = 24
"""Minimum runs in one CUDA graph, because its start and end add time that belongs to no run."""
WARM_UP = 3
"""Rounds before the first recorded one."""

Inputs = Sequence[Tensor]
Run = Callable[[Inputs], object]


@dataclass(frozen=True)
class Method:
    """One implementation of a chain."""

    run: Run
    overwrites: bool = False
    """Whether a run writes its results over its inputs; the method then gets inputs of its own."""


def copy_count(chain: Chain) -> int:
    """Number of input sets that together are larger than L2."""
    size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in chain.inputs)
    return max(1, min(MAX_COPIES, -(-COLD_BYTES // size)))


def repeat_sets(sets: Sequence[Inputs]) -> list[Inputs]:
    """The sets of inputs of one CUDA graph, repeated until it has enough runs."""
    return [*sets] * -(-MIN_RUNS // len(sets))


def capture_graph(run: Run, sets: Sequence[Inputs]) -> torch.cuda.CUDAGraph:
    """Capture one run for each set of inputs; outputs live in the graph's memory pool."""
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


def time_replay(graph: torch.cuda.CUDAGraph, runs: int) -> float:
    """Replay a graph once and return microseconds for each of its runs."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / runs


def time_quickly(run: Run, sets: Sequence[Inputs]) -> float:
    """Median microseconds of a run, to choose a method; the chosen method is timed again."""
    every = repeat_sets(sets)
    graph = capture_graph(run, every)
    return statistics.median(time_replay(graph, len(every)) for _ in range(15))


def own_copies(method: Method, sets: Sequence[Inputs]) -> Sequence[Inputs]:
    """Copies of the inputs if the method overwrites them, otherwise the inputs."""
    return [[x.clone() for x in inputs] for inputs in sets] if method.overwrites else sets


def time_interleaved(
    methods: Mapping[str, Method],
    sets: Sequence[Inputs],
    rounds: int,
    capture: Callable[[Run, Sequence[Inputs]], Any] = capture_graph,
    time_run: Callable[[Any, int], float] = time_replay,
    layouts: int = 1,
) -> dict[str, list[float]]:
    """Microseconds of each method in every round; the first method of a round rotates.

    Times also depend on memory addresses.  The rounds are split into ``layouts`` equal parts, and
    each part has its inputs at other addresses.
    """
    samples: dict[str, list[float]] = {name: [] for name in methods}
    generator = random.Random(0)
    for layout in range(layouts):
        padding = _pads(generator) if layout else []
        layout_sets = [[x.clone() for x in inputs] for inputs in sets] if layout else sets
        for name, times in _rounds(
            methods, layout_sets, rounds // layouts, capture, time_run
        ).items():
            samples[name] += times
        del layout_sets, padding
    return samples


def _pads(generator: random.Random) -> list[Tensor]:
    """Allocate padding of random size, so that later allocations get other addresses."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [torch.empty(generator.randrange(1, 64) << 20, dtype=torch.uint8, device=device)]


def _rounds(
    methods: Mapping[str, Method],
    sets: Sequence[Inputs],
    rounds: int,
    capture: Callable[[Run, Sequence[Inputs]], Any],
    time_run: Callable[[Any, int], float],
) -> dict[str, list[float]]:
    # A CUDA graph holds the addresses of its inputs only, so the inputs must stay alive.
    method_sets = {name: own_copies(method, sets) for name, method in methods.items()}
    graphs = {
        name: capture(method.run, repeat_sets(method_sets[name]))
        for name, method in methods.items()
    }
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for number in range(rounds + WARM_UP):
        first = number % len(methods)
        for name in [*list(methods)[first:], *list(methods)[:first]]:
            microseconds = time_run(graphs[name], len(repeat_sets(sets)))
            if number >= WARM_UP:
                samples[name].append(round(microseconds, 4))
    return samples


def compare_methods(samples: Mapping[str, Sequence[float]], layouts: int = 1) -> dict[str, Any]:
    """Compare the stitched chain with each other method; the null is eager PyTorch, timed twice.

    ``layouts`` as in :func:`time_interleaved`.
    """
    comparisons = {}
    for name in samples:
        if name in ("stitched", "eager again"):
            continue
        # The null is known for eager only; apply its ratio in each round to the method's samples.
        scale = [b / a for a, b in zip(samples["eager"], samples["eager again"], strict=True)]
        null = [x * s for x, s in zip(samples[name], scale, strict=True)]
        result = Comparison.from_samples(
            samples[name], samples["stitched"], null, kind="measured", loads=layouts
        )
        comparisons[name] = {
            "ratio": round(result.ratio, 4),
            "low": round(result.low, 4),
            "high": round(result.high, 4),
            "verdict": result.verdict,
        }
    return comparisons
