"""The evaluator beside a GPU: are schedules in the order that the model says, and what is each
part of the compiler worth?

    python -m benchmarks run fusion.cost_model --out OUT [--limit 250] [--chains PART] [--most 24] [--seed 0]

For every chain of ``benchmarks.fusion.chains.programs``, spread over the visible GPUs: a sample of
the legal plans of each kernel of the explorer's partition is compiled and timed
(``fusion_evaluator_sample``, ``fusion_evaluator_timing``), then whole partitions (the explorer's,
the greedy one, one grown along producers), each with the modelled first choice of every kernel and
raced.  All processor cores compile meanwhile (``fusion_evaluator_compile``).  OUT is one JSON with
every sample, saved after each chain; a second run goes on with the chains that are missing.
``--list`` shows the sample without a GPU, ``--summary`` what OUT says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.cost_model.compile import awaited, compiled, pool, processes, task_of
from benchmarks.fusion.cost_model.sample import MOST, work_of
from benchmarks.fusion.cost_model.summary import summary
from benchmarks.fusion.cost_model.timing import ROUNDS, Here, ablation, kernel_times
from benchmarks.harness import gpu_pool
from benchmarks.harness.result_file import save
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.store.folder import home

EXPECTED = 12.0
"""Seconds of one chain whose kernels are compiled."""
PATIENCE = 90.0
"""Seconds that a chain waits for its compilers; plans that take longer are left out."""


@dataclass(frozen=True)
class Job:
    """One chain, in the process of one GPU."""

    chain: str
    here: Here
    most: int
    seed: int
    until: float


def measured(job: Job) -> dict[str, Any]:
    """All numbers of a chain.  A fault on the GPU ends the process: the next chain gets another."""
    began = monotonic()
    try:
        with torch.no_grad():
            work = work_of(CHAINS[job.chain], job.most, job.seed)
            keys = [program.key for program in work.programs()]
            known = awaited(job.here.folder, keys, min(job.until, began + PATIENCE))
            if monotonic() > job.until:
                raise TimeoutError(f"{len(known)} of {len(keys)} programs are compiled")
            ready = monotonic()
            return {
                "kernels": [kernel_times(kernel, known, job.here) for kernel in work.kernels],
                "packed": [list(group) for group in work.packed],
                "ablation": ablation(work, job.here),
                "seconds": {
                    "waited": round(ready - began, 1),
                    "measured": round(monotonic() - ready, 1),
                },
                "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
                "torch": torch.__version__,
            }
    except RuntimeError:
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except RuntimeError:
            traceback.print_exc()
            os._exit(70)
        raise


def feed(workers: Pool, names: Sequence[str], most: int, seed: int) -> None:
    """Hand the compilers every program of these chains, in their order."""
    asked: set[str] = set()
    for name in names:
        try:
            programs = work_of(CHAINS[name], most, seed).programs()
        except Exception:  # the chain's own job will say so
            traceback.print_exc()
            continue
        for program in programs:
            if program.key not in asked:
                asked.add(program.key)
                workers.apply_async(compiled, (task_of(program),))


def run(
    out: Path,
    names: Sequence[str],
    found: Sequence[str],
    options: argparse.Namespace,
    job: Callable[[Job], dict[str, Any]] = measured,
) -> None:
    """Measure these chains on these GPUs; what is in OUT stays."""
    import triton

    until = monotonic() + options.limit
    known = json.loads(out.read_text()) if out.exists() else {"chains": {}}
    chains = known["chains"]
    todo = [name for name in names if name not in chains]
    folder = home() / "benchmarks" / f"fusion_evaluator_{triton.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    here = Here(folder, "cuda", options.rounds)
    jobs = [Job(name, here, options.most, options.seed, until - EXPECTED / 2) for name in todo]
    queues = [jobs[at :: len(found)] for at in range(len(found))]
    failed: dict[str, str] = {}
    if not todo:
        print(f"all of {len(names)} chains are in {out}")
        return
    with pool(folder, processes(len(found)), options.capability or capability()) as workers:
        feeder = threading.Thread(
            target=feed, args=(workers, todo, options.most, options.seed), daemon=True
        )
        feeder.start()
        for answer in gpu_pool.run_jobs(job, queues, found, until, lambda _: EXPECTED):
            name = answer.job.chain
            if answer.result is None:
                failed[name] = f"{type(answer.error).__name__}: {str(answer.error)[:300]}"
                print(f"{name}: {failed[name]}", flush=True)
            else:
                chains[name] = answer.result
                print(line(name, answer.result), flush=True)
            settings = {"most": options.most, "seed": options.seed, "rounds": options.rounds}
            body = {"kind": "measured", "settings": settings, "chains": chains, "failed": failed}
            save(out, **body, summary=summary(chains))
    left = [name for name in names if name not in chains]
    print(f"{len(names) - len(left)} of {len(names)} chains; left: {', '.join(left) or 'none'}")


def line(name: str, chain: dict[str, Any]) -> str:
    """One line on a terminal."""
    told = summary({name: chain})
    parts = [f"tau {told['tau']['mean']}", f"regret {told['regret']['mean']}"]
    parts += [f"{key} {ratio['mean']}" for key, ratio in told["ablation"].items()]
    wrong = f", WRONG: {told['wrong']}" if told["wrong"] else ""
    return f"{name}: {told['plans']} plans, {', '.join(parts)}{wrong}, {chain['seconds']}"


def listed(names: Sequence[str], options: argparse.Namespace) -> None:
    """The sample, and what will be compiled."""
    programs = 0
    for name in names:
        work = work_of(CHAINS[name], options.most, options.seed)
        programs += len(work.programs())
        print(f"{name}: { ({k: len(v) for k, v in work.partitions.items()}) } kernels")
        for kernel in work.kernels:
            print(f"  {len(kernel.plans)} of {kernel.legal} plans ({kernel.of.kind})")
            for plan in kernel.plans:
                print(
                    f"    modelled {1e6 * modelled_seconds(PlannedKernel(kernel.of, plan)):9.1f} us: {plan}"
                )
    print(f"{programs} programs")


def capability() -> int:
    """90 of a GPU of compute capability 9.0.  Asks the driver: no context is made here."""
    command = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    major, minor = told.split()[0].split(".")
    return 10 * int(major) + int(minor)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chains", default="", help="only chains with this in their name")
    parser.add_argument("--most", type=int, default=MOST, help="plans of one kernel")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--limit", type=float, default=250.0, help="stop after so many seconds")
    parser.add_argument("--capability", type=int, help="compile for this; asked for by default")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--summary", action="store_true")


def main(options: argparse.Namespace) -> None:
    names = [name for name in CHAINS if options.chains in name]
    if options.list:
        listed(names, options)
    elif options.summary:
        print(json.dumps(summary(json.loads(options.out.read_text())["chains"]), indent=1))
    elif found := gpu_pool.visible_gpus():
        run(options.out, names, found, options)
    else:
        sys.exit("there is no GPU here; run this on one, or give --list")
