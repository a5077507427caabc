"""Interleaved times, CUDA graphs, kernel profiles and CPU time of a model's steps."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

Step = Callable[[], object]
MAX_NAME = 100
"""Maximum characters of a kernel's name in a result file."""


class TimingSettings(Protocol):
    """Settings of a measurement: its device, and seconds for each set of samples."""

    @property
    def device(self) -> str: ...
    @property
    def measured_s(self) -> float: ...


def synchronize(device: str) -> None:
    """Wait until the device has finished all work."""
    if device == "cuda":
        torch.cuda.synchronize()


def time_interleaved(
    runs: Mapping[str, Step], setup: TimingSettings, base: str = ""
) -> dict[str, Any]:
    """Seconds of each run, interleaved, and comparisons with ``base`` (default: the first run).

    ``base`` runs twice (the null).  A sample has so many runs that it takes ``sample_seconds``, but
    at least one.
    """
    # Lazy imports: the first step of nostall's program must include them, Inductor's must not.
    from nostall.core.measurement import Comparison
    from nostall.gpu.clock import LOOP_SECONDS, MIN_SAMPLE_SECONDS, EventClock, WallClock

    sample_seconds = LOOP_SECONDS if setup.device == "cuda" else MIN_SAMPLE_SECONDS
    clock = EventClock(sample_seconds) if setup.device == "cuda" else WallClock()
    base = base or next(iter(runs))
    *rows, null = clock.samples("", [*runs.values(), runs[base]], setup.measured_s)
    samples = dict(zip(runs, rows, strict=True))
    compared = {}
    for name, row in samples.items():
        if name != base:
            comparison = Comparison.from_samples(samples[base], row, null, kind=clock.kind)
            ratio, low, high = comparison.ratio, comparison.low, comparison.high
            compared[name] = {
                "ratio": ratio,
                "low": low,
                "high": high,
                "verdict": comparison.verdict,
            }
            compared[name] |= {"null_low": comparison.null_low, "null_high": comparison.null_high}
    return {
        "base": base,
        "sample_seconds": sample_seconds,
        "samples_s": samples,
        "null_s": null,
        "compared": compared,
    }


def peak_bytes(step: Step) -> int:
    """Peak memory of a step on the GPU above what is allocated before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


@dataclass(frozen=True)
class CapturedStep:
    """A step as a CUDA graph, which owns the memory of its gradients."""

    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


def capture_step(step: Step) -> CapturedStep:
    """Capture a whole step, forward and backward, as one CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    # Autograd runs backward passes in another thread.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    graph.replay()
    torch.cuda.synchronize()
    return CapturedStep(graph)


def profile_kernels(step: Step) -> dict[str, Any]:
    """Profile one step: launches of kernels and their seconds, in all and by name.

    Memory copies and fills are counted separately.
    """
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            step()
            torch.cuda.synchronize()
    except Exception as error:  # the times are useful without a profile
        return {"failed": f"{type(error).__name__}: {error}"}
    count: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if event.name.startswith(("Memcpy", "Memset")):
            copies[event.name] += 1
            continue
        count[event.name[:MAX_NAME]] += 1
        seconds[event.name[:MAX_NAME]] += 1e-6 * event.time_range.elapsed_us()
    return {
        "copies": dict(copies),
        "launches": count.total(),
        "busy_s": seconds.total(),
        "by_name": [[name, count[name], spent] for name, spent in seconds.most_common()],
    }


def cpu_seconds() -> float:
    """CPU seconds of this process and its descendants, with ended ones that were waited for."""
    seconds_by_pid: dict[int, float] = {}
    parents: dict[int, int] = {}
    ticks_per_second = os.sysconf("SC_CLK_TCK")
    for process_folder in Path("/proc").iterdir():
        if not process_folder.name.isdigit():
            continue
        try:
            # Fields after the name, which may contain spaces and parentheses: state, parent, ...,
            # then utime and stime of the process and of its ended children.
            fields = (process_folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        pid = int(process_folder.name)
        parents[pid] = int(fields[1])
        seconds_by_pid[pid] = sum(map(int, fields[11:15])) / ticks_per_second
    total = 0.0
    for pid, seconds in seconds_by_pid.items():
        ancestor = pid
        while ancestor not in (os.getpid(), 0):
            ancestor = parents.get(ancestor, 0)
        total += seconds if ancestor else 0.0
    return total


class Stopwatch:
    """Stopwatch of wall time, CPU time of processes and of this thread, and garbage collection.

    Only full collections (generation 2) count.
    """

    def __init__(self) -> None:
        self._start, self._cpu_start = time.perf_counter(), cpu_seconds()
        self._thread_start = time.thread_time()
        self._collector_seconds = self._collection_start = 0.0
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] == 2:
            now = time.perf_counter()
            self._collector_seconds += now - self._collection_start if phase == "stop" else 0.0
            self._collection_start = now

    def elapsed(self, until: str) -> dict[str, Any]:
        """Seconds since the start; ``until`` is the prefix of the keys."""
        return {
            f"{until}_s": time.perf_counter() - self._start,
            f"{until}_cpu_s": cpu_seconds() - self._cpu_start,
            f"{until}_thread_s": time.thread_time() - self._thread_start,
            f"{until}_collector_s": self._collector_seconds,
        }
