"""Benchmark of how fast programs (thread blocks) of a kernel can start, with and without PDL.

    python -m benchmarks run fusion.program_start_rate --out OUT [--rounds 20]

The time of a kernel whose many programs do nothing is the time to start them.  Programmatic
dependent launch (PDL) starts a kernel before the previous one ends; its programs may wait for the
previous kernel (``gdc_wait``) and let the next one start (``gdc_launch_dependents``, the trigger).
Each variant of :data:`VARIANTS` is a CUDA graph of ``LAUNCHES`` kernels; replays are interleaved.
Times are nanoseconds for one program.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.fusion.chains.timing import capture_graph, time_replay
from benchmarks.harness.result_file import save

PROGRAMS = (1 << 14, 1 << 17)
WARPS = (1, 2, 4, 8)
LAUNCHES = 8


@triton.jit
def idle(waits: tl.constexpr, triggers: tl.constexpr):
    if waits:
        tl.extra.cuda.gdc_wait()
    if triggers:
        tl.extra.cuda.gdc_launch_dependents()


VARIANTS = {
    "after the other": (False, False, False),
    "early": (True, True, True),
    "wait only": (True, False, True),
    "launched early": (False, False, True),
    "said only": (True, True, False),
}
"""Whether a program waits, whether it triggers, and whether its kernel is launched with PDL."""


def measure(rounds: int) -> list[dict[str, Any]]:
    """One record for each number of programs and warps."""
    return [
        _measure_launch(*configuration, rounds)
        for configuration in itertools.product(PROGRAMS, WARPS)
    ]


def _measure_launch(programs: int, warps: int, rounds: int) -> dict[str, Any]:
    graphs = {}
    for name, (waits, triggers, is_early) in VARIANTS.items():
        options = {"num_warps": warps, **({"launch_pdl": True} if is_early else {})}
        launch = functools.partial(idle[(programs,)], waits, triggers, **options)
        graphs[name] = capture_graph(lambda _, launch=launch: launch(), [()] * LAUNCHES)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(round(1e3 * time_replay(graph, LAUNCHES) / programs, 4))
    return {"programs": programs, "warps": warps, "ns_each": samples}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)


def main(options: argparse.Namespace) -> None:
    records = measure(options.rounds)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    save(options.out, **environment, triton=triton.__version__, measured=records)
    for record in records:
        medians = (f"{n} {statistics.median(s):.3f}" for n, s in record["ns_each"].items())
        print(f"{record['programs']} programs of {record['warps']} warps, ns: {', '.join(medians)}")
