"""Stitched chains beside eager, torch.compile and Liger on GPUs, under CUDA graphs.

    python -m benchmarks run fusion.chains --out OUT [--chains PART ...] [--limit SECONDS] [--race 8]

For every chain of ``benchmarks.fusion.chains.programs`` a fresh process builds the methods of
``benchmarks.fusion.chains.methods`` and the stitched version.  The latter's plans come from a short
race: for the explorer's partition and the greedy one, the modelled best plans of every kernel are
timed (``--race 0``: the modelled first choice runs), and the faster partition is taken.  Each
method is captured as a CUDA graph that walks over copies of its inputs larger than L2, four times
with memory elsewhere; replays are interleaved round by round, eager runs twice (the null).  Times
are microseconds for one run.  OUT is a folder with one JSON for each chain; chains that are there
already are left out, so an interrupted run goes on.  Every visible GPU has one chain at a time;
none is begun that would not end within ``--limit``.  ``--list`` shows the chains and plans without
a GPU.
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

from benchmarks.fusion.chains.accuracy import Judge
from benchmarks.fusion.chains.methods import others
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import graph_of, least_bytes, partitions, raced
from benchmarks.fusion.chains.timing import compared, copies, in_turns
from benchmarks.harness.gpu_pool import assign_queues, run_jobs, visible_gpus
from benchmarks.harness.ncu import run_within
from benchmarks.harness.result_file import save
from nostall.core.errors import BadInput
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.cost.default_plan import default_plan
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators

LOADS = 4
"""How often memory is laid out anew: what that is worth by chance is part of the intervals."""
EXPECTED = 60.0
"""Seconds that a chain is thought to take; none is begun later than that before the limit."""


def measured(chain: Chain, rounds: int, most: int, seconds: float) -> dict[str, Any]:
    """All methods of one chain, side by side; needs a GPU.  ``seconds``: for Inductor's options."""
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
        sets = [chain.tensors("cuda") for _ in range(copies(chain))]
        judge = Judge(chain, sets[0])
        stitched, how = raced(chain, sets, most, Path(folder))
        errors = judge.errors(stitched)
        if reason := judge.wrong(errors):
            raise RuntimeError(f"the stitched chain is wrong: {reason} ({how['plans']})")
        methods, told = others(chain, sets, judge, seconds)
        del judge
        told["largest_errors"]["stitched"] = errors
        samples = in_turns({**methods, "stitched": stitched}, sets, rounds, loads=LOADS)
    return {
        "chain": chain.name,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copies": len(sets),
        "bytes_least": least_bytes(graph_of(chain)),
        "stitched": how,
        **told,
        "samples_us": samples,
        "loads": LOADS,
        "compared": compared(samples, LOADS),
    }


# -- all chains ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A chain and the arguments of its own process; ``until`` is of the monotonic clock."""

    name: str
    arguments: tuple[str, ...]
    until: float


def in_own_process(job: Job) -> str:
    """A fault ends the process of its chain only.  What went wrong; empty where nothing did."""
    command = [sys.executable, "-m", "benchmarks", "run", "fusion.chains", *job.arguments]
    left = max(1.0, job.until - monotonic())
    try:
        code, _, said = run_within(command, left)
    except TimeoutExpired:
        return f"not done within the {left:.0f} s that were left"
    last = (said.strip().splitlines() or [""])[-1]
    return f"exit code {code}: {last[:300]}" if code else ""


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{''.join(c if c.isalnum() else '_' for c in name)}.json"


def told(folder: Path, name: str) -> str:
    """One line on a chain that was measured."""
    found = json.loads(file_of(folder, name).read_text())
    ratios = ", ".join(f"{of} {c['ratio']:.3f}" for of, c in found["compared"].items())
    failed = "".join(f"; {of}: {why}" for of, why in found["failures"].items() if of != "liger")
    return f"{ratios} ({'; '.join(found['stitched']['plans'])}){failed}"


def listed(names: Sequence[str]) -> None:
    """Chains with the kernels of both partitions and the plans that the model prefers."""
    for name in names:
        graph = graph_of(CHAINS[name])
        print(f"{name}: at least {least_bytes(graph) / 1e6:.1f} MB")
        for kind, groups in partitions(graph).items():
            for group in groups:
                try:
                    print(
                        f"  {kind}: {default_plan(schedule_operators(graph, group))} (modelled choice)"
                    )
                except BadInput as error:
                    print(f"  {kind}: no kernel, will be cut: {error}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--chains", nargs="*", default=[""], help="only names with such a part")
    parser.add_argument("--rounds", type=int, default=40)
    race = "modelled best plans; 0: no race"
    parser.add_argument("--race", type=int, default=MAX_CANDIDATES, help=race)
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all chains")
    parser.add_argument("--inductor", type=float, default=45, help="seconds for a chain's options")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", help="this chain, in this process (used by itself)")


def main(options: argparse.Namespace) -> None:
    names = [name for name in CHAINS if any(part in name for part in options.chains)]
    if options.list:
        listed(names)
        return
    if options.one is not None:
        found = measured(CHAINS[options.one], options.rounds, options.race, options.inductor)
        save(file_of(options.out, options.one), **found)
        return
    gpus = visible_gpus()
    if not gpus:
        sys.exit("there is no GPU here; run this on one, or give --list")
    until = monotonic() + options.limit
    given = [
        "--out",
        str(options.out),
        "--rounds",
        str(options.rounds),
        "--race",
        str(options.race),
    ]
    given += ["--inductor", str(options.inductor)]
    left = [name for name in names if not file_of(options.out, name).exists()]
    jobs = [Job(name, (*given, "--one", name), until) for name in left]
    queues = assign_queues(jobs, len(gpus), lambda job: job.name, left)
    for answer in run_jobs(in_own_process, queues, gpus, until, lambda _: EXPECTED):
        failed = answer.result if answer.error is None else str(answer.error)
        name = answer.job.name
        print(f"{name}: {failed or told(options.out, name)}", flush=True)
