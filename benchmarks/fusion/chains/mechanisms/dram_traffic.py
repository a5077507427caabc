"""Benchmark of DRAM traffic: bytes and kernels of each chain's methods, counted by ncu.

    python -m benchmarks run fusion.dram_traffic --out OUT.json [--results FOLDER] [--limit SECONDS]

For every measured chain (``--results``, a folder of ``benchmarks.fusion.chains.chains``) a process
under ncu runs torch.compile, max-autotune and the stitched kernels of the result once each, after a
warm-up, with none of their data in L2.  Then a large buffer is read, which evicts what the method
wrote to L2: the DRAM writes of that read count as the method's.

ncu does not change clocks or flush caches.  Needs GPUs whose performance counters may be read; each
visible GPU measures one chain at a time.  Chains that OUT.json has are skipped.
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

from benchmarks.fusion.chains.chains import result_path
from benchmarks.fusion.chains.methods import MAX_AUTOTUNE, compile_chain
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import rebuild, stitched_method
from benchmarks.fusion.chains.timing import Method
from benchmarks.harness.gpu_pool import assign_queues, run_jobs, visible_gpus
from benchmarks.harness.ncu import READ, WRITTEN, find_ncu, number, run_within, table
from benchmarks.harness.result_file import results, save

METHODS = ("compile", "max-autotune", "stitched")
MARKER_KERNEL = "spin_kernel"
"""Part of the name of the marker kernel (``torch.cuda._sleep``) before and after each method."""
FLUSHED_BYTES = 512 << 20
"""Bytes of the buffer that is read to flush L2."""
EXPECTED_SECONDS = 20.0
"""Expected seconds of one chain under ncu."""


def parse_traffic(lines: Sequence[str], stderr: str) -> dict[str, dict[str, Any]]:
    """Parse kernels and bytes of each method from ncu's raw page of one chain.

    Raises ValueError if ncu counted nothing or a method has no kernels.
    """
    sections: list[list[Mapping[str, str]]] = []
    for row in table(lines, stderr, {"Kernel Name": (), READ: ("byte",), WRITTEN: ("byte",)}):
        if MARKER_KERNEL in row["Kernel Name"]:
            sections.append([])
        elif sections:
            sections[-1].append(row)
    if len(sections) != 2 * len(METHODS) or not all(sections):
        sizes = [len(section) for section in sections]
        raise ValueError(
            f"ncu counted {sizes} kernels after the marker kernels; expected {2 * len(METHODS)} "
            "markers, each with kernels after it"
        )
    traffic = {}
    for name, kernels, flush in zip(METHODS, sections[::2], sections[1::2], strict=True):
        traffic[name] = {
            "kernels": len(kernels),
            "read_bytes": sum(number(row[READ]) for row in kernels),
            "written_bytes": sum(number(row[WRITTEN]) for row in [*kernels, *flush]),
            "names": [row["Kernel Name"][:80] for row in kernels],
        }
    return traffic


# -- under ncu -------------------------------------------------------------------------------------


def run_methods_once(chain: Chain, description: dict[str, Any]) -> None:
    """Run every method under ncu, which profiles one run of each."""
    inputs = chain.tensors("cuda")
    flush_buffer = torch.ones(FLUSHED_BYTES // 4, device="cuda")
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
        stitched = stitched_method(rebuild(chain, description, Path(folder)), len(chain.inputs))
        tuned = Method(compile_chain(chain, dict(MAX_AUTOTUNE)))
        methods = (Method(compile_chain(chain)), tuned, stitched)
        for method in methods:
            for _ in range(2):
                method.run(inputs)
        for method in methods:
            flush_buffer.sum()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            torch.cuda._sleep(1000)
            outputs = method.run(inputs)
            torch.cuda._sleep(1000)
            flush_buffer.sum()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            del outputs


@dataclass(frozen=True)
class Job:
    """A chain to be profiled."""

    name: str
    ncu: str
    """Path of the ncu executable."""
    result: Path
    """Result file that describes the stitched kernels."""
    deadline: float
    """When the process has to end, in seconds of the monotonic clock."""


def profile_chain(job: Job) -> dict[str, Any]:
    """Profile one chain under ncu.  Raises ValueError if it fails or nothing was counted."""
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
        exit_code, stdout, stderr = run_within(command, max(1.0, job.deadline - monotonic()))
    except TimeoutExpired as error:
        raise ValueError("ncu did not end within the remaining time") from error
    if exit_code:
        raise ValueError(
            f"exit code {exit_code}: {' '.join((stdout + stderr).strip()[-300:].split())}"
        )
    return parse_traffic(stdout.splitlines(), stderr)


# -- all chains ------------------------------------------------------------------------------------


def summary_line(traffic: Mapping[str, Any]) -> str:
    """MB and number of kernels of each method in one line."""
    parts = []
    for name, counts in traffic.items():
        megabytes = (counts["read_bytes"] + counts["written_bytes"]) / 1e6
        parts.append(f"{name} {megabytes:.1f} MB in {counts['kernels']}")
    return ", ".join(parts)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--results",
        type=Path,
        default=results("fusion") / "chains",
        help="folder with the results of fusion.chains",
    )
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for all chains")
    parser.add_argument(
        "--one", type=Path, help="run the chain of this result (internal, under ncu)"
    )


def main(options: argparse.Namespace) -> int:
    if options.one is not None:
        result = json.loads(options.one.read_text())
        run_methods_once(CHAINS[result["chain"]], result["stitched"])
        return 0
    ncu, gpus = find_ncu(), visible_gpus()
    if ncu is None or not gpus:
        print(
            "this needs a visible GPU and ncu on the PATH (part of Nsight Compute)", file=sys.stderr
        )
        return 3
    deadline = monotonic() + options.limit
    chains = json.loads(options.out.read_text())["chains"] if options.out.exists() else {}
    result_paths = {name: result_path(options.results, name) for name in CHAINS}
    pending = [
        n for n in CHAINS if result_paths[n].exists() and "stitched" not in chains.get(n, {})
    ]
    jobs = [Job(name, ncu, result_paths[name], deadline) for name in pending]
    queues = assign_queues(jobs, len(gpus), lambda job: job.name, pending)
    for answer in run_jobs(profile_chain, queues, gpus, deadline, lambda _: EXPECTED_SECONDS):
        name, traffic = answer.job.name, answer.result or {"failure": str(answer.error)[:400]}
        chains[name] = traffic
        print(f"{name}: {traffic.get('failure') or summary_line(traffic)}", flush=True)
        save(options.out, kind="measured", torch=torch.__version__, chains=chains)
    return 0
