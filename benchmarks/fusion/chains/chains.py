"""Benchmark of stitched chains: eager PyTorch, torch.compile, Liger and nostall in CUDA graphs.

    python -m benchmarks run fusion.chains --out OUT [--set train | test] [--chains PART ...]
        [--limit SECONDS] [--race 8]

For every chain of ``benchmarks.fusion.chains.programs``, or of one half of the generated ones
(``--set``, ``benchmarks.fusion.chains.generated``), a new process builds the methods of
``benchmarks.fusion.chains.methods`` and the stitched kernels.  Kernel plans are tuned: for the
explorer's and the greedy partition, the modelled best plans of every kernel are measured
(``--race 0``: the modelled best plan runs), and the faster partition is taken.

Each method is captured as a CUDA graph over copies of its inputs that are larger than L2.  Replays
are interleaved round by round, with four memory layouts; eager PyTorch runs twice (the null).
Times are microseconds of one run.

OUT is a folder with one JSON for each chain.  Chains that have a file are skipped, so an
interrupted run can be continued.  Every visible GPU measures one chain at a time; a chain starts
only if it is expected to end within ``--limit``.  ``--list`` prints chains and plans without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic
from typing import Any

import torch

from benchmarks.fusion.chains.accuracy import AccuracyCheck
from benchmarks.fusion.chains.generated import GENERATED, generated_names
from benchmarks.fusion.chains.methods import baseline_methods
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import chain_graph, min_bytes, partitions, tune
from benchmarks.fusion.chains.timing import compare_methods, copy_count, time_interleaved
from benchmarks.harness.gpu_pool import assign_queues, run_jobs, visible_gpus
from benchmarks.harness.ncu import run_within
from benchmarks.harness.result_file import save
from nostall.core.errors import BadInput
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.generate import schedule_operators

ALL_CHAINS = {**CHAINS, **GENERATED}
LAYOUTS = 4
"""Number of memory layouts; the intervals include the variation between layouts."""
EXPECTED_SECONDS = 60.0
"""Expected seconds of one chain; none starts if less time is left."""


def measure_chain(
    chain: Chain, rounds: int, max_candidates: int, inductor_s: float
) -> dict[str, Any]:
    """Time all methods of one chain, interleaved; needs a GPU.

    ``max_candidates``: measured plans of each kernel; ``inductor_s``: time limit for Inductor's
    options.  Raises RuntimeError if the stitched kernels give a wrong result.
    """
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
        sets = [chain.tensors("cuda") for _ in range(copy_count(chain))]
        accuracy = AccuracyCheck(chain, sets[0])
        stitched, description = tune(chain, sets, max_candidates, Path(folder))
        errors = accuracy.errors(stitched)
        if reason := accuracy.failure(errors):
            raise RuntimeError(
                f"{chain.name}: the stitched kernels {description['plans']} are wrong: {reason}"
            )
        methods, details = baseline_methods(chain, sets, accuracy, inductor_s)
        del accuracy
        details["largest_errors"]["stitched"] = errors
        samples = time_interleaved({**methods, "stitched": stitched}, sets, rounds, layouts=LAYOUTS)
    return {
        "chain": chain.name,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copies": len(sets),
        "bytes_least": min_bytes(chain_graph(chain)),
        "stitched": description,
        **details,
        "samples_us": samples,
        "loads": LAYOUTS,
        "compared": compare_methods(samples, LAYOUTS),
    }


# -- all chains ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A chain that a process of its own measures."""

    name: str
    arguments: tuple[str, ...]
    """Command-line arguments of the process."""
    deadline: float
    """When the process has to end, in seconds of the monotonic clock."""


def run_in_process(job: Job) -> str:
    """Measure a chain in a new process, so that a fault affects only this chain.

    Returns a message about what went wrong; empty on success.
    """
    command = [sys.executable, "-m", "benchmarks", "run", "fusion.chains", *job.arguments]
    remaining = max(1.0, job.deadline - monotonic())
    try:
        exit_code, _, stderr = run_within(command, remaining)
    except TimeoutExpired:
        return f"the process did not end within the remaining {remaining:.0f} s"
    last_line = (stderr.strip().splitlines() or [""])[-1]
    return f"exit code {exit_code}: {last_line[:300]}" if exit_code else ""


def result_path(folder: Path, name: str) -> Path:
    """Result file of a chain."""
    return folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.json"


def summary_line(folder: Path, name: str) -> str:
    """Ratios, plans and failures of a measured chain in one line."""
    result = json.loads(result_path(folder, name).read_text())
    ratios = ", ".join(
        f"{name} {comparison['ratio']:.3f}" for name, comparison in result["compared"].items()
    )
    failed = "".join(
        f"; {name}: {reason}" for name, reason in result["failures"].items() if name != "liger"
    )
    return f"{ratios} ({'; '.join(result['stitched']['plans'])}){failed}"


def print_plans(names: Sequence[str]) -> None:
    """Print the modelled best plan of every kernel of both partitions of the chains."""
    for name in names:
        graph = chain_graph(ALL_CHAINS[name])
        print(f"{name}: at least {min_bytes(graph) / 1e6:.1f} MB")
        for partition, kernels in partitions(graph).items():
            for group in kernels.groups:
                try:
                    plan = default_plan(schedule_operators(kernels.graph, group))
                    print(f"  {partition}: {plan} (modelled best)")
                except BadInput as error:
                    print(f"  {partition}: no kernel, will be split: {error}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--set", choices=("named", "train", "test"), default="named", help="chains to measure"
    )
    parser.add_argument(
        "--chains", nargs="*", default=[""], help="only chains whose names contain one of these"
    )
    parser.add_argument("--rounds", type=int, default=40)
    candidates_help = "modelled best plans of each kernel that are measured; 0: none"
    parser.add_argument("--race", type=int, default=MAX_CANDIDATES, help=candidates_help)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all chains")
    parser.add_argument(
        "--inductor", type=float, default=45, help="seconds for a chain's Inductor options"
    )
    parser.add_argument("--list", action="store_true", help="print plans; needs no GPU")
    parser.add_argument("--one", help="measure this chain in this process (internal)")


def main(options: argparse.Namespace) -> None:
    known = list(CHAINS) if options.set == "named" else generated_names(options.set)
    names = [name for name in known if any(part in name for part in options.chains)]
    if options.list:
        print_plans(names)
        return
    if options.one is not None:
        result = measure_chain(
            ALL_CHAINS[options.one], options.rounds, options.race, options.inductor
        )
        save(result_path(options.out, options.one), **result)
        return
    gpus = visible_gpus()
    if not gpus:
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --list")
    deadline = monotonic() + options.limit
    arguments = [
        "--out",
        str(options.out),
        "--rounds",
        str(options.rounds),
        "--race",
        str(options.race),
    ]
    arguments += ["--inductor", str(options.inductor)]
    pending = [name for name in names if not result_path(options.out, name).exists()]
    jobs = [Job(name, (*arguments, "--one", name), deadline) for name in pending]
    queues = assign_queues(jobs, len(gpus), lambda job: job.name, pending)
    for answer in run_jobs(run_in_process, queues, gpus, deadline, lambda _: EXPECTED_SECONDS):
        failure = answer.result if answer.error is None else str(answer.error)
        name = answer.job.name
        print(f"{name}: {failure or summary_line(options.out, name)}", flush=True)
