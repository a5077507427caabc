"""Do kinds of chains gain that nothing was developed with, as users deploy the backend?

    python -m benchmarks run fusion.unseen_kinds --out OUT [--split test] [--limit 300]
        [--kinds PART ...] [--workers 5] [--autotune] [--except EARLIER ...]

The kinds are those of ``benchmarks.fusion.chains.projects``, each a chain of two sizes: all chains
of the first size come first.  Methods, clocks and checks: ``benchmarks.fusion.unseen.deployed``.
``--workers`` processes share each GPU and take turns to time.  OUT is saved after each chain; a
second run continues with the missing ones; chains in EARLIER files are left out.  ``--list`` prints
kinds and projects without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.programs import Chain
from benchmarks.fusion.chains.projects import PROJECTS, Kind, kinds_of, project_chains
from benchmarks.fusion.unseen.deployed import Case, Settings, measure, summary_line
from benchmarks.fusion.unseen.kinds_page import figures
from benchmarks.harness import gpu_pool
from benchmarks.harness.gpu_lock import LOCK_VARIABLE
from benchmarks.harness.result_file import load, save

EXPECTED_SECONDS = 60.0
"""Expected seconds of one chain; none starts if less time is left."""
Job = tuple[str, Settings]


def case_of(name: str) -> Case:
    """The chain as a case; its inputs are random, those of trained kinds are leaves."""
    kind, chain = project_chains()[name]
    return Case(name, chain.function, partial(_inputs, kind, chain))


def _inputs(kind: Kind, chain: Chain, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = chain.tensors(device)
    return [
        x.requires_grad_() if kind.trained and x.is_floating_point() and at not in kind.constants
        else x
        for at, x in enumerate(tensors)
    ]  # fmt: skip


def measure_chain(job: Job) -> dict[str, Any]:
    """The record of a chain, with its kind and its project."""
    name, settings = job
    kind, chain = project_chains()[name]
    about = {"kind": chain.name, "project": kind.project, "trained": kind.trained}
    return about | measure(case_of(name), settings)


def run(
    options: argparse.Namespace,
    names: Sequence[str],
    gpus: Sequence[str],
    job: Callable[[Job], dict[str, Any]] = measure_chain,
) -> None:
    """Measure these chains on these GPUs, except those that the result file has."""
    deadline = monotonic() + options.limit
    chains: dict[str, Any] = load(options.out)["chains"] if options.out.exists() else {}
    settings = Settings(options.device, options.seconds, autotuned=options.autotune, quiet=True)
    jobs = [(name, settings) for name in names if name not in chains]
    processes = [gpu for _ in range(options.workers) for gpu in gpus]
    queues = [jobs[at :: len(processes)] for at in range(len(processes))]
    failures: dict[str, str] = {}
    os.environ.setdefault(LOCK_VARIABLE, str(Path(tempfile.gettempdir()) / "nostall-kinds.lock"))
    for answer in gpu_pool.run_jobs(job, queues, processes, deadline, lambda _: EXPECTED_SECONDS):
        name = answer.job[0]
        if answer.result is None:
            failures[name] = f"{type(answer.error).__name__}: {str(answer.error)[:300]}"
            print(f"{name}: {failures[name]}", flush=True)
        else:
            chains[name] = answer.result
            print(summary_line(answer.result), flush=True)
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else "none"
        save(
            options.out, kind="measured", torch=torch.__version__, gpu=gpu, split=options.split,
            planned=list(names), chains=chains, failed=failures,
        )  # fmt: skip
    for title, *cells in figures(list(chains.values())) if chains else ():
        print(f"{title}: {'; '.join(cells)}")
    print(f"{sum(name in chains for name in names)} of {len(names)} chains")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--split", choices=("train", "test"), default="test", help="half of kinds")
    parser.add_argument("--kinds", nargs="*", default=[""], help="only names with one of these")
    parser.add_argument("--except", nargs="*", default=[], type=Path, dest="earlier",
                        help="result files whose chains are not measured again")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of each comparison")
    parser.add_argument("--workers", type=int, default=5, help="processes of each GPU")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for all chains")
    parser.add_argument("--autotune", action="store_true", help="measure max-autotune, too")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--list", action="store_true", help="print the kinds; needs no GPU")


def main(options: argparse.Namespace) -> None:
    if options.list:
        for split in ("train", "test"):
            for name in kinds_of(split):
                print(f"{split}: {name} ({PROJECTS[name].project})")
        return
    half = set(kinds_of(options.split))
    done = {name for path in options.earlier for name in load(path)["chains"]}
    names = [
        name
        for name, (_, chain) in project_chains().items()
        if chain.name in half and name not in done and any(part in name for part in options.kinds)
    ]
    if gpus := gpu_pool.visible_gpus() if options.device == "cuda" else ["cpu"]:
        run(options, names, gpus)
    else:
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --list")
