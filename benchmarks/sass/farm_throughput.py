"""Candidates per second of a search on one, two and more GPUs of this machine.

    python -m benchmarks run sass.farm_throughput --gpus 1 2 4 \\
        --out benchmarks/sass/results/farm_throughput.json

Runs one search per GPU for ``--seconds``, then compares the finalists on one GPU, through Dask like
``nostall tune --workers``. Needs the GPUs and ``nostall[farm,gpu]``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.harness.result_file import save
from benchmarks.kernels.examples import EXAMPLES
from nostall import farm
from nostall.gpu import Kernel, MeasurementPlan
from nostall.search import Anneal
from nostall.tuning.farm_search import ParallelChains
from nostall.tuning.job import tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import compile_triton


def measure(source: Source, gpus: int, settings: Settings) -> dict[str, Any]:
    """Record of one tuning run on ``gpus`` GPUs."""
    assert source.launch is not None
    device_spec = farm.DeviceSpec(
        Kernel(source.cubin, source.kernel, source.launch), MeasurementPlan()
    )
    began = monotonic()
    with farm.local(gpus, wait_seconds=120) as workers:
        device = farm.FarmDevice(workers, device_spec)
        about, started = dict(device.info), monotonic()
        tuned = tune(
            source, ParallelChains(Anneal(), workers, device_spec), settings, device=device
        )
    comparison = tuned.decision.comparison if tuned.decision is not None else None
    return {
        "gpus": gpus,
        "kernel": source.kernel,
        "kind": "measured",
        "evaluations": tuned.search.evaluations,
        "search_s": round(tuned.search.seconds, 2),
        "per_second": round(tuned.search.evaluations / tuned.search.seconds, 1),
        "starting_s": round(started - began, 2),
        "seconds": round(monotonic() - started, 2),
        "ratio": comparison.ratio if comparison else None,
        "interval": [comparison.low, comparison.high] if comparison else None,
        "null": [comparison.null_low, comparison.null_high] if comparison else None,
        "deployed_ratio": tuned.ratio,
        "gpu": about,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=15.0, help="of search, per run")
    parser.add_argument("--kernel", default="gemm_leakyrelu.py:gemm_leakyrelu@mma")


def main(options: argparse.Namespace) -> None:
    path, _, name = options.kernel.partition(":")
    source = compile_triton(EXAMPLES / path, name, None, "sm_90")
    settings = Settings(seconds=options.seconds, objective="gpu")
    runs = []
    for gpus in options.gpus:
        runs.append(measure(source, gpus, settings))
        print(runs[-1], flush=True)
    save(options.out, kind="measured", runs=runs)
