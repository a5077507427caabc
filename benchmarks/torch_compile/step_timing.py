"""Times, launches and processor time of steps, for ``benchmarks.torch_compile.model_process``."""

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
NAME = 100
"""Characters of a kernel's name that are kept."""


class Timed(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def measured_s(self) -> float: ...


def synchronized(device: str) -> None:
    """Wait until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(runs: Mapping[str, Step], about: Timed, base: str = "") -> dict[str, Any]:
    """Seconds of each run, taken in turns, and how they compare with those of ``base`` (of the
    first one), which runs twice: the null."""
    # A program by nostall imports it in its first step, and one by Inductor never.
    from nostall.core.measurement import Comparison
    from nostall.gpu.clock import EventClock, WallClock

    clock = EventClock() if about.device == "cuda" else WallClock()
    base = base or next(iter(runs))
    *rows, null = clock.samples("", [*runs.values(), runs[base]], about.measured_s)
    samples = dict(zip(runs, rows, strict=True))
    compared = {}
    for name, row in samples.items():
        if name != base:
            found = Comparison.from_samples(samples[base], row, null, kind=clock.kind)
            ratio, low, high = found.ratio, found.low, found.high
            compared[name] = {"ratio": ratio, "low": low, "high": high, "verdict": found.verdict}
            compared[name] |= {"null_low": found.null_low, "null_high": found.null_high}
    return {"base": base, "samples_s": samples, "null_s": null, "compared": compared}


@dataclass(frozen=True)
class Captured:
    """A step as a CUDA graph.  Its gradients live in the graph's memory as long as it does."""

    graph: torch.cuda.CUDAGraph

    def replay(self) -> None:
        self.graph.replay()


def captured(step: Step) -> Captured:
    """A whole step, forward and backward, as one CUDA graph."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    # Backward passes run in a thread of their own.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    graph.replay()
    torch.cuda.synchronize()
    return Captured(graph)


def kernels_of(step: Step) -> dict[str, Any]:
    """What the GPU runs in one step: number of kernels, their seconds, and both by name; copies of
    memory and what fills it are counted apart."""
    from torch.profiler import ProfilerActivity, profile

    step()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step()
            torch.cuda.synchronize()
    except Exception as error:  # times are worth keeping without it
        return {"failed": f"{type(error).__name__}: {error}"}
    count: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        if event.name.startswith(("Memcpy", "Memset")):
            copies[event.name] += 1
            continue
        count[event.name[:NAME]] += 1
        seconds[event.name[:NAME]] += 1e-6 * event.time_range.elapsed_us()
    return {
        "copies": dict(copies),
        "launches": count.total(),
        "busy_s": seconds.total(),
        "by_name": [[name, count[name], spent] for name, spent in seconds.most_common()],
    }


def processor_seconds() -> float:
    """Of this process and all that descend from it, ended ones included where they were waited
    for."""
    spent: dict[int, float] = {}
    parent: dict[int, int] = {}
    tick = os.sysconf("SC_CLK_TCK")
    for place in Path("/proc").iterdir():
        if not place.name.isdigit():
            continue
        try:
            # Behind the name, which may hold anything: state, parent, ..., utime, stime, and
            # the same of children.
            fields = (place / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        number = int(place.name)
        parent[number] = int(fields[1])
        spent[number] = sum(map(int, fields[11:15])) / tick
    total = 0.0
    for number, seconds in spent.items():
        above = number
        while above not in (os.getpid(), 0):
            above = parent.get(above, 0)
        total += seconds if above else 0.0
    return total


class Watch:
    """Seconds of the clock, of all processors, of this thread, and of those in which Python's
    garbage collector goes through everything there is."""

    def __init__(self) -> None:
        self._began, self._spent = time.perf_counter(), processor_seconds()
        self._thread = time.thread_time()
        self._collected = self._since = 0.0
        gc.callbacks.append(self._heard)

    def _heard(self, phase: str, about: Mapping[str, int]) -> None:
        if about["generation"] == 2:
            now = time.perf_counter()
            self._collected += now - self._since if phase == "stop" else 0.0
            self._since = now

    def said(self, until: str) -> dict[str, Any]:
        return {
            f"{until}_s": time.perf_counter() - self._began,
            f"{until}_cpu_s": processor_seconds() - self._spent,
            f"{until}_thread_s": time.thread_time() - self._thread,
            f"{until}_collector_s": self._collected,
        }
