"""What chains really move: DRAM bytes and kernels of each method, counted by ncu.

    python -m benchmarks run fusion.dram_traffic --out OUT.json [--results FOLDER] [--limit SECONDS]

For every chain that was measured (``--results``, as ``benchmarks.fusion.chains.chains`` leaves them) a
process under ncu runs torch.compile, max-autotune and the stitched kernels of the result once each,
after a warm-up, from a cache that holds nothing of theirs.  What a method leaves in the cache to be
written is counted with it: a large buffer is read behind it, and the writes of that are its own.
Clocks and caches are left alone.  Needs GPUs whose counters may be read; every visible one has one
chain at a time.  Chains that are counted are left out when it runs again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic
from typing import Any

import torch

from benchmarks.fusion.chains.chains import file_of
from benchmarks.fusion.chains.methods import TUNED, compiled
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import method, taken
from benchmarks.fusion.chains.timing import Method
from benchmarks.harness.gpu_pool import assign_queues, run_jobs, visible_gpus
from benchmarks.harness.ncu import READ, WRITTEN, find_ncu, number, run_within, table
from benchmarks.harness.result_file import results, save

COUNTED = ("compile", "max-autotune", "stitched")
MARK = "spin_kernel"
"""Part of the name of the kernel that stands before and behind each method."""
FLUSHED_BYTES = 512 << 20
EXPECTED = 20.0
"""Seconds that a chain is thought to take under ncu."""


def counted(lines: Sequence[str], said: str) -> dict[str, dict[str, Any]]:
    """Kernels and bytes by method, out of ncu's raw page of one chain.

    Raises :class:`ValueError` where ncu counted nothing or not all.
    """
    parts: list[list[Mapping[str, str]]] = []
    for row in table(lines, said, {"Kernel Name": (), READ: ("byte",), WRITTEN: ("byte",)}):
        if MARK in row["Kernel Name"]:
            parts.append([])
        elif parts:
            parts[-1].append(row)
    if len(parts) != 2 * len(COUNTED) or not all(parts):
        sizes = [len(part) for part in parts]
        raise ValueError(
            f"ncu counted {sizes} kernels between marks; there have to be some behind each of "
            f"{2 * len(COUNTED)} marks"
        )
    found = {}
    for name, own, behind in zip(COUNTED, parts[::2], parts[1::2], strict=True):
        found[name] = {
            "kernels": len(own),
            "read_bytes": sum(number(row[READ]) for row in own),
            "written_bytes": sum(number(row[WRITTEN]) for row in [*own, *behind]),
            "names": [row["Kernel Name"][:80] for row in own],
        }
    return found


# -- under ncu -------------------------------------------------------------------------------------


def run_once(chain: Chain, how: dict[str, Any]) -> None:
    """Every method, with ncu looking at one run of each."""
    inputs = chain.tensors("cuda")
    cold = torch.ones(FLUSHED_BYTES // 4, device="cuda")
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
        stitched = method(taken(chain, how, Path(folder)), len(chain.inputs))
        tuned = Method(compiled(chain, dict(TUNED)))
        methods = (Method(compiled(chain)), tuned, stitched)
        for one in methods:
            for _ in range(2):
                one.run(inputs)
        for one in methods:
            cold.sum()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1000)
            kept = one.run(inputs)
            torch.cuda._sleep(1000)
            cold.sum()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            del kept


@dataclass(frozen=True)
class Job:
    """A chain, the result whose kernels it runs, and when it has to end (monotonic clock)."""

    name: str
    ncu: str
    result: Path
    until: float


def count(job: Job) -> dict[str, Any]:
    """One chain under ncu; raises :class:`ValueError` where nothing was counted."""
    command = [
        *(job.ncu, "--clock-control", "none", "--cache-control", "none"),
        *("--target-processes", "application-only", "--profile-from-start", "off"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *(
            "--metrics",
            ",".join((READ, WRITTEN)),
            sys.executable,
            *("-m", "benchmarks", "run", "fusion.dram_traffic"),
        ),
        *("--out", os.devnull, "--one", str(job.result)),
    ]
    try:
        code, out, said = run_within(command, max(1.0, job.until - monotonic()))
    except TimeoutExpired as error:
        raise ValueError("it was not done within the seconds that were left") from error
    if code:
        raise ValueError(f"exit code {code}: {' '.join((out + said).strip()[-300:].split())}")
    return counted(out.splitlines(), said)


# -- all chains ------------------------------------------------------------------------------------


def line(found: Mapping[str, Any]) -> str:
    """MB and kernels of each method."""
    return ", ".join(
        f"{name} {(c['read_bytes'] + c['written_bytes']) / 1e6:.1f} MB in {c['kernels']}"
        for name, c in found.items()
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=results("fusion") / "chains")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all chains")
    parser.add_argument("--one", type=Path, help="the chain of this result (used under ncu)")


def main(options: argparse.Namespace) -> int:
    if options.one is not None:
        result = json.loads(options.one.read_text())
        run_once(CHAINS[result["chain"]], result["stitched"])
        return 0
    ncu, gpus = find_ncu(), visible_gpus()
    if ncu is None or not gpus:
        print(
            "this needs a GPU, and ncu on the PATH (it comes with Nsight Compute)", file=sys.stderr
        )
        return 3
    until = monotonic() + options.limit
    chains = json.loads(options.out.read_text())["chains"] if options.out.exists() else {}
    places = {name: file_of(options.results, name) for name in CHAINS}
    left = [n for n in CHAINS if places[n].exists() and "stitched" not in chains.get(n, {})]
    jobs = [Job(name, ncu, places[name], until) for name in left]
    queues = assign_queues(jobs, len(gpus), lambda job: job.name, left)
    for answer in run_jobs(count, queues, gpus, until, lambda _: EXPECTED):
        name, found = answer.job.name, answer.result or {"failure": str(answer.error)[:400]}
        chains[name] = found
        print(f"{name}: {found.get('failure') or line(found)}", flush=True)
        save(options.out, kind="measured", torch=torch.__version__, chains=chains)
    return 0
