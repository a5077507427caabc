"""Benchmark of chains that no rule was written for: plans, stitched kernels and torch.compile.

    python -m benchmarks run fusion.unseen_chains --set train --out OUT.json [--limit 230]
        [--count 60] [--chains PART ...] [--most 10] [--workers 3]

``--set``: one half of the generated chains (``benchmarks.fusion.chains.generated``), the chains
that users reported, or the named ones.  The chains are taken in turn from every kind.  Of each, a
sample of the plans of every kernel of the explorer's partition is timed (``--most 1``: none), then,
interleaved, torch.compile with its defaults and three stitched versions: the explorer's partition
and the greedy one with the modelled best plans, and the explorer's with the fastest measured plans.

``--earlier``: a JSON with the plans that another commit selected for each chain; only these chains
are measured, with those plans as a further version.  ``--autotune``: Inductor's mode
max-autotune-no-cudagraphs is a further version.

``--workers`` processes share each GPU; one measures while the others plan and compile.  The
remaining CPU cores compile plans.  OUT has every sample, and is saved after each chain; a second
run continues with the missing chains.  ``--list`` prints the chains without a GPU.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.fusion.chains.generated import KINDS, generated_names
from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.reported import REPORTED
from benchmarks.fusion.cost_model.compile import (
    compiler_pool,
    process_count,
    submit_programs,
)
from benchmarks.fusion.cost_model.evaluate import capability
from benchmarks.fusion.cost_model.timing import TimingSettings
from benchmarks.fusion.unseen.measure import INDUCTOR, Job, measure, sample
from benchmarks.harness import gpu_pool
from benchmarks.harness.result_file import load, save
from nostall.fusion.codegen.emit.program import Program
from nostall.store.folder import home

EXPECTED_SECONDS = 20.0
"""Expected seconds of one chain; none starts if less time is left."""
SETS = ("train", "test", "reported", "named")


def names_of(set_name: str) -> list[str]:
    """The chains of a set; those of a generated half in turn from every kind."""
    if set_name == "reported":
        return list(REPORTED)
    if set_name == "named":
        return list(CHAINS)
    names = generated_names("train" if set_name == "train" else "test")
    kinds = sorted(KINDS, key=len, reverse=True)
    by_kind: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for name in names:
        by_kind[next(kind for kind in kinds if name.startswith(f"{kind} "))].append(name)
    # Sizes ascend in every kind, so alternate between the ends: a part of the set has all sizes.
    rows = zip_longest(*(_from_both_ends(names) for names in by_kind.values()))
    return [name for name in chain.from_iterable(rows) if name is not None]


def _from_both_ends(names: Sequence[str]) -> list[str]:
    return [names[at // 2] if at % 2 else names[-1 - at // 2] for at in range(len(names))]


def run(
    options: argparse.Namespace,
    names: Sequence[str],
    gpus: Sequence[str],
    job: Callable[[Job], dict[str, Any]] = measure,
) -> None:
    """Measure these chains on these GPUs, except those that the result file has."""
    import triton

    deadline = monotonic() + options.limit
    chains = load(options.out)["chains"] if options.out.exists() else {}
    pending = [name for name in names if name not in chains]
    if not pending:
        print(f"{options.out} has all {len(names)} chains")
        return
    folder = home() / "benchmarks" / f"unseen_{triton.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = TimingSettings(folder, options.device, options.rounds)
    earlier = _earlier_plans(options.earlier)
    jobs = [
        Job(name, settings, options.most, earlier.get(name, ()), deadline, options.autotune)
        for name in pending
    ]
    processes = [gpu for _ in range(options.workers) for gpu in gpus]
    queues = [jobs[at :: len(processes)] for at in range(len(processes))]
    failures: dict[str, str] = {}
    cores = process_count(len(processes))

    def programs_of(name: str) -> Iterable[Program]:
        return sample(name, options.most, earlier.get(name, ())).programs()

    with compiler_pool(folder, cores, options.capability or capability()) as workers:
        feeder = threading.Thread(
            target=submit_programs, args=(workers, pending, programs_of), daemon=True
        )
        feeder.start()
        for answer in gpu_pool.run_jobs(
            job, queues, processes, deadline, lambda _: EXPECTED_SECONDS
        ):
            name = answer.job.chain
            if answer.result is None:
                failures[name] = f"{type(answer.error).__name__}: {str(answer.error)[:500]}"
                print(f"{name}: {failures[name]}", flush=True)
            else:
                chains[name] = answer.result
                print(summary_line(name, answer.result), flush=True)
            save(options.out, kind="measured", set=options.set, chains=chains, failed=failures)
    print(f"{sum(name in chains for name in names)} of {len(names)} chains")


def _earlier_plans(path: Path | None) -> dict[str, tuple[str, ...]]:
    """Plans by chain; empty without a file."""
    chains = {} if path is None else load(path)["chains"]
    return {name: tuple(plans) for name, plans in chains.items()}


def summary_line(name: str, result: dict[str, Any]) -> str:
    """Time of torch.compile divided by each stitched version's, and what went wrong."""
    us = result["us"]
    base = us.get(INDUCTOR)
    ratios = ", ".join(f"{key} {base / value:.2f}" for key, value in us.items() if base and value)
    plans = "; ".join(result["versions"].get("explorer", {}).get("plans", ()))
    problems = {**result["failures"], **result["wrong"]}
    return f"{name}: {base} us; {ratios} ({plans}) {problems or ''} {result['seconds']}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", choices=SETS, default="train", help="chains to measure")
    parser.add_argument("--chains", nargs="*", default=[""], help="only names with one of these")
    parser.add_argument("--count", type=int, default=1000, help="at most this many chains")
    parser.add_argument("--most", type=int, default=10, help="plans of each kernel; 1: none")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each plan and version")
    parser.add_argument("--workers", type=int, default=3, help="processes of each GPU")
    parser.add_argument("--limit", type=float, default=230.0, help="seconds for all chains")
    parser.add_argument("--capability", type=int, help="compute capability to compile for, e.g. 90")
    parser.add_argument("--device", default="cuda", help="device of the tensors")
    parser.add_argument("--earlier", type=Path, help="JSON with plans of another commit by chain")
    parser.add_argument("--autotune", action="store_true", help="measure max-autotune, too")
    parser.add_argument("--list", action="store_true", help="print the chains; needs no GPU")


def main(options: argparse.Namespace) -> None:
    known = names_of(options.set)
    names = [name for name in known if any(part in name for part in options.chains)]
    if options.earlier is not None:
        names = [name for name in names if name in _earlier_plans(options.earlier)]
    names = names[: options.count]
    if options.list:
        print("\n".join(names))
    elif gpus := gpu_pool.visible_gpus():
        run(options, names, gpus)
    else:
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --list")
