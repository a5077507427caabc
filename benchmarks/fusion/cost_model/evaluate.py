"""Benchmark of the cost model on GPUs: rank agreement of plans, and gains of the compiler's parts.

    python -m benchmarks run fusion.cost_model --out OUT [--limit 250] [--chains PART] [--most 24]
        [--seed 0]

The chains of ``benchmarks.fusion.chains.programs`` are distributed over the visible GPUs.  For each
chain a sample of the legal plans of every kernel of the explorer's partition is compiled and timed
(``sample``, ``timing``).  Then whole partitions are timed (the explorer's, the greedy one and one
grown along producers), each with the modelled best plan of every kernel and with tuned plans.  All
other CPU cores compile at the same time (``compile``).

OUT is one JSON with every sample, saved after each chain; a second run continues with the missing
chains.  ``--list`` prints the sample without a GPU, ``--summary`` the statistics of OUT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.cost_model.compile import (
    compiler_pool,
    process_count,
    submit_programs,
    wait_for_programs,
)
from benchmarks.fusion.cost_model.sample import MAX_PLANS, sample_chain
from benchmarks.fusion.cost_model.summary import summarize
from benchmarks.fusion.cost_model.timing import ROUNDS, TimingSettings, time_plans, time_variants
from benchmarks.harness import gpu_pool
from benchmarks.harness.gpu_fault import end_process_after_fault
from benchmarks.harness.result_file import save
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.store.folder import home

EXPECTED_SECONDS = 12.0
"""Expected seconds of one chain whose kernels are compiled."""
COMPILE_TIMEOUT = 90.0
"""Seconds that a chain waits for compilation; plans that take longer are left out."""


@dataclass(frozen=True)
class Job:
    """One chain to measure in a worker process of a GPU."""

    chain: str
    settings: TimingSettings
    max_plans: int
    """Maximum plans of each kernel."""
    seed: int
    deadline: float
    """End of the measurement, in seconds of the monotonic clock."""


def measure(job: Job) -> dict[str, Any]:
    """Measure a chain.  A GPU fault ends the process; the next chain gets a new one.

    Raises TimeoutError if the deadline passes while programs are compiled.
    """
    start = monotonic()
    with end_process_after_fault(), torch.no_grad():
        sample = sample_chain(CHAINS[job.chain], job.max_plans, job.seed)
        keys = [program.key for program in sample.programs()]
        resources = wait_for_programs(
            job.settings.folder, keys, min(job.deadline, start + COMPILE_TIMEOUT)
        )
        if monotonic() > job.deadline:
            raise TimeoutError(
                f"only {len(resources)} of {len(keys)} programs were compiled in time"
            )
        ready = monotonic()
        return {
            "kernels": [time_plans(kernel, resources, job.settings) for kernel in sample.kernels],
            "packed": [list(group) for group in sample.packed],
            "ablation": time_variants(sample, job.settings),
            "seconds": {
                "waited": round(ready - start, 1),
                "measured": round(monotonic() - ready, 1),
            },
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
            "torch": torch.__version__,
        }


def run(
    out: Path,
    names: Sequence[str],
    gpus: Sequence[str],
    options: argparse.Namespace,
    job: Callable[[Job], dict[str, Any]] = measure,
) -> None:
    """Measure these chains on these GPUs, except those that OUT has."""
    import triton

    deadline = monotonic() + options.limit
    previous = json.loads(out.read_text()) if out.exists() else {"chains": {}}
    chains = previous["chains"]
    pending = [name for name in names if name not in chains]
    folder = home() / "benchmarks" / f"fusion_evaluator_{triton.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = TimingSettings(folder, "cuda", options.rounds)
    jobs = [
        Job(name, settings, options.most, options.seed, deadline - EXPECTED_SECONDS / 2)
        for name in pending
    ]
    queues = [jobs[at :: len(gpus)] for at in range(len(gpus))]
    failures: dict[str, str] = {}

    def programs_of(name: str) -> Iterable[Program]:
        return sample_chain(CHAINS[name], options.most, options.seed).programs()

    if not pending:
        print(f"{out} has all {len(names)} chains")
        return
    with compiler_pool(
        folder, process_count(len(gpus)), options.capability or capability()
    ) as workers:
        feeder = threading.Thread(
            target=submit_programs, args=(workers, pending, programs_of), daemon=True
        )
        feeder.start()
        for answer in gpu_pool.run_jobs(job, queues, gpus, deadline, lambda _: EXPECTED_SECONDS):
            name = answer.job.chain
            if answer.result is None:
                failures[name] = f"{type(answer.error).__name__}: {str(answer.error)[:300]}"
                print(f"{name}: {failures[name]}", flush=True)
            else:
                chains[name] = answer.result
                print(summary_line(name, answer.result), flush=True)
            stored_settings = {"most": options.most, "seed": options.seed, "rounds": options.rounds}
            body = {
                "kind": "measured",
                "settings": stored_settings,
                "chains": chains,
                "failed": failures,
            }
            save(out, **body, summary=summarize(chains))
    missing = [name for name in names if name not in chains]
    print(
        f"{len(names) - len(missing)} of {len(names)} chains; left: {', '.join(missing) or 'none'}"
    )


def summary_line(name: str, chain: dict[str, Any]) -> str:
    """Statistics of a measured chain in one line."""
    statistics = summarize({name: chain})
    parts = [f"tau {statistics['tau']['mean']}", f"regret {statistics['regret']['mean']}"]
    parts += [f"{key} {ratio['mean']}" for key, ratio in statistics["ablation"].items()]
    wrong = f", WRONG: {statistics['wrong']}" if statistics["wrong"] else ""
    return f"{name}: {statistics['plans']} plans, {', '.join(parts)}{wrong}, {chain['seconds']}"


def print_sample(names: Sequence[str], options: argparse.Namespace) -> None:
    """Print the sampled plans and the number of programs."""
    programs = 0
    for name in names:
        sample = sample_chain(CHAINS[name], options.most, options.seed)
        programs += len(sample.programs())
        counts = {partition: len(kernels) for partition, kernels in sample.partitions.items()}
        print(f"{name}: {counts} kernels")
        for kernel in sample.kernels:
            print(f"  {len(kernel.plans)} of {kernel.legal} plans ({kernel.schedule.kind})")
            for plan in kernel.plans:
                seconds = modelled_seconds(PlannedKernel(kernel.schedule, plan))
                print(f"    modelled {1e6 * seconds:9.1f} us: {plan}")
    print(f"{programs} programs")


def capability() -> int:
    """Compute capability of the first GPU, e.g. 90.  nvidia-smi reads it without a CUDA context."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    major, minor = output.split()[0].split(".")
    return 10 * int(major) + int(minor)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chains", default="", help="only chains whose names contain this")
    parser.add_argument("--most", type=int, default=MAX_PLANS, help="plans of each kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=250.0, help="seconds for all chains")
    parser.add_argument("--capability", type=int, help="compute capability to compile for, e.g. 90")
    parser.add_argument("--list", action="store_true", help="print the sample; needs no GPU")
    parser.add_argument("--summary", action="store_true", help="print the statistics of OUT")


def main(options: argparse.Namespace) -> None:
    names = [name for name in CHAINS if options.chains in name]
    if options.list:
        print_sample(names, options)
    elif options.summary:
        print(json.dumps(summarize(json.loads(options.out.read_text())["chains"]), indent=1))
    elif gpus := gpu_pool.visible_gpus():
        run(options.out, names, gpus, options)
    else:
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --list")
