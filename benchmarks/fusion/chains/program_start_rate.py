"""How fast programs can begin: kernels that only wait and let the next one begin, or do neither.

    python -m benchmarks run fusion.program_start_rate --out OUT [--rounds 20]

A kernel of many programs that do nothing takes as long as they need to begin, one after the other.
*early* has what programmatic dependent launch takes, a wait and a trigger in each program; *wait
only* lets the next kernel begin when it ends; *launched early* has neither in it, *said only* both,
but is launched as any other kernel.  Each way is a CUDA graph of ``LAUNCHES`` kernels, replayed in
turns; a time is nanoseconds for one program.
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

from benchmarks.fusion.chains.timing import captured_graph, replayed
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


WAYS = {
    "after the other": (False, False, False),
    "early": (True, True, True),
    "wait only": (True, False, True),
    "launched early": (False, False, True),
    "said only": (True, True, False),
}
"""Whether a program waits and triggers, and whether its kernel is launched early."""


def measured(rounds: int) -> list[dict[str, Any]]:
    """One record for each number of programs and warps."""
    return [_measured(*of, rounds) for of in itertools.product(PROGRAMS, WARPS)]


def _measured(programs: int, warps: int, rounds: int) -> dict[str, Any]:
    graphs = {}
    for name, (waits, triggers, early) in WAYS.items():
        more = {"num_warps": warps, **({"launch_pdl": True} if early else {})}
        launch = functools.partial(idle[(programs,)], waits, triggers, **more)
        graphs[name] = captured_graph(lambda _, launch=launch: launch(), [()] * LAUNCHES)
    samples: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            samples[name].append(round(1e3 * replayed(graph, LAUNCHES) / programs, 4))
    return {"programs": programs, "warps": warps, "ns_each": samples}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=20)


def main(options: argparse.Namespace) -> None:
    records = measured(options.rounds)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    save(options.out, **about, triton=triton.__version__, measured=records)
    for record in records:
        told = (f"{n} {statistics.median(s):.3f}" for n, s in record["ns_each"].items())
        print(f"{record['programs']} programs of {record['warps']} warps, ns: {', '.join(told)}")
