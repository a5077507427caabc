"""The compiler's own best: what a kernel's warps and pipeline stages are worth, before any search.

    python -m benchmarks.baseline --out benchmarks/results/gpu_baseline.json

Every example kernel of Triton is compiled with 24 pairs of ``num_warps`` and ``num_stages`` and
timed; :mod:`benchmarks.gpu_suite` (``--baseline FILE``) then starts from the fastest.  Pairs that
compile to the same bytes are timed once.  Tile sizes stay as the example has them.  Needs a GPU; a
second run does only the kernels that are missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from benchmarks.example_kernels import EXAMPLES, TRITON
from benchmarks.provenance import head
from benchmarks.record import Configuration
from nostall.core import NostallError
from nostall.core.launch import LaunchSpec
from nostall.core.run import write_atomically
from nostall.gpu import Device, Kernel, LocalGpu, Plan
from nostall.tuning.source import Source, compile_triton, launch_of

WARPS = (1, 2, 4, 8)
STAGES = (1, 2, 3, 4, 5, 6)
ROUNDS = 30

Build = Callable[[LaunchSpec], Source]
Measure = Callable[[Source], float]


def sweep(launch: LaunchSpec, build: Build, measure: Measure) -> tuple[Configuration, ...]:
    """Every pair of warps and stages, timed; one that does not compile or run says why."""
    known: dict[bytes, float] = {}
    found = []
    for warps, stages in product(WARPS, STAGES):
        options = launch.model_copy(update={"num_warps": warps, "num_stages": stages})
        us, failure = None, ""
        try:
            source = build(options)
            if source.cubin not in known:
                known[source.cubin] = measure(source)
            us = known[source.cubin]
        except NostallError as error:
            failure = " ".join(str(error).split())[:200]
        found.append(Configuration(num_warps=warps, num_stages=stages, us=us, failure=failure))
    return tuple(found)


def fastest(configurations: Sequence[Configuration]) -> Configuration | None:
    """The one with the least time; the first of equals, None when none ran."""
    ran = [c for c in configurations if c.us is not None]
    return min(ran, key=lambda c: c.us or 0.0, default=None)


def median_us(device: Device, source: Source) -> float:
    """Microseconds per launch of the kernel itself."""
    outcome = device.compare(source.cubin, ROUNDS, 1)
    if outcome.timing is None:
        raise NostallError(f"{source.kernel}: {outcome.fate}: {outcome.detail}")
    return round(float(np.median(outcome.timing.original)) * 1e6, 4)


def load(path: Path) -> dict[str, tuple[Configuration, ...]]:
    """The baselines of a file, by kernel."""
    kernels = json.loads(path.read_text())["kernels"]
    return {name: tuple(map(Configuration.model_validate, kernels[name])) for name in kernels}


def _measure(source: Source) -> float:
    assert source.launch is not None
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch), Plan()) as gpu:
        return median_us(gpu, source)


def _line(name: str, launch: LaunchSpec, found: Sequence[Configuration]) -> str:
    best = fastest(found)
    if best is None:
        return f"{name:26} none of {len(found)} configurations ran: {found[0].failure}"
    as_given = (launch.num_warps, launch.num_stages)
    own = next((c.us for c in found if (c.num_warps, c.num_stages) == as_given), None)
    return (
        f"{name:26} best of {len(found)}: {best.num_warps} warps, {best.num_stages} stages, "
        f"{best.us} us; as written {own} us"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernel", nargs="*", help="only these")
    parser.add_argument("--limit", type=float, default=500.0, help="stop after so many seconds")
    options = parser.parse_args()
    started, kernels = monotonic(), dict[str, Any]()
    if options.out.exists():
        kernels = json.loads(options.out.read_text())["kernels"]
    for target in TRITON:
        path, _, name = target.partition(":")
        if name in kernels or (options.kernel and name not in options.kernel):
            continue
        if monotonic() - started > options.limit:
            print("the time is up; run again for the rest")
            break
        file = EXAMPLES / path
        launch = launch_of(file, name)

        def build(spec: LaunchSpec, file: Path = file, name: str = name) -> Source:
            return compile_triton(file, name, spec, "sm_90")

        found = sweep(launch, build, _measure)
        print(_line(name, launch, found), flush=True)
        kernels[name] = [c.model_dump() for c in found]
        body = {**head(), "kind": "measured", "kernels": kernels}
        write_atomically(options.out, (json.dumps(body, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
