"""Checks of the guarantees of the torch.compile backend on a GPU.

    python -m benchmarks run torch_compile.guarantees --out OUT.json [--only fp8,ranks]
        [--limit 300]

Checks: results in fp8; dropout masks in steps and in CUDA graph replays; tensors of more than 2^31
elements; a dynamic batch; bitwise reproducibility after the choice; two ranks that run the version
that rank 0 has chosen; and two ranks that train with DistributedDataParallel (NCCL with two GPUs,
otherwise gloo).

Every check runs in its own process with its own caches (``guarantee_checks``,
``guarantee_ranks``), so that a fault affects only that check.  ``bits`` runs in three successive
processes with one store.  OUT keeps the results of checks that are not run again.  Exit code 1 if
anything is wrong.

``--device cpu`` runs small checks in Triton's interpreter (set TRITON_INTERPRET=1), with recorded
times that let stitched versions win.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.harness.result_file import save
from benchmarks.torch_compile import guarantee_checks, guarantee_ranks

CHECKS: dict[str, Callable[[str, bool, Path], guarantee_checks.Result]] = {
    "fp8": guarantee_checks.check_fp8,
    "dropout": guarantee_checks.check_dropout,
    "large": guarantee_checks.check_large_tensor,
    "varying": guarantee_checks.check_dynamic_batch,
    "bits": guarantee_checks.check_bits,
    "ranks": guarantee_ranks.check_ranks,
    "ddp": guarantee_ranks.check_ddp,
}

RUN_COUNTS = {"bits": 3}
"""Number of successive runs of a check with the same caches (default 1)."""
RANKS = {"ranks": 2, "ddp": 2}
"""Number of ranks of a check, which run at the same time."""


def start_process(name: str, device: str, folder: Path, out: Path, rank: int | None) -> Any:
    """Start a process that writes its result to ``out``.  Each rank has its own caches."""
    caches = folder if rank is None else folder / str(rank)
    environment = {
        "NOSTALL_HOME": str(caches / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "RANK": str(rank or 0),
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "run"]
    command += ["torch_compile.guarantees", "--out", str(out), "--run", name]
    command += ["--device", device, "--place", str(folder)]
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def run_check(name: str, device: str, folder: Path, deadline: float) -> list[dict[str, Any]]:
    """Run all processes of a check; returns their results in order."""
    results: list[dict[str, Any]] = []
    ranks = range(RANKS[name]) if name in RANKS else (None,)
    for repetition in range(RUN_COUNTS.get(name, 1)):
        result_paths = [folder / f"{repetition}.{rank}.json" for rank in ranks]
        children = [
            start_process(name, device, folder, out, rank)
            for out, rank in zip(result_paths, ranks, strict=True)
        ]
        for child, out in zip(children, result_paths, strict=True):
            results.append(wait_for_result(child, out, deadline))
    return results


def wait_for_result(child: Any, out: Path, deadline: float) -> dict[str, Any]:
    """Wait for a process and read its result; kills it at ``deadline``."""
    try:
        _, stderr = child.communicate(timeout=max(1.0, deadline - monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"wrong": ["no time was left"]}
    if child.returncode or not out.exists():
        lines = stderr.decode(errors="replace").strip().splitlines()
        return {"wrong": [f"exit code {child.returncode}: {' | '.join(lines[-3:])}"]}
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def compare_processes(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Differences between the processes of a check that must not exist."""
    wrong = []
    if name == "bits" and len({tuple(run.get("digests", ())) for run in runs}) > 1:
        wrong.append("different bits in another run")
    if name == "bits" and not all(run.get("from store") for run in runs[1:]):
        wrong.append("a later run has chosen again")
    if name in RANKS:
        for key in ("digest", "kernels"):
            first, second = (json.dumps(run.get(key)) for run in runs)
            if first != second:
                wrong.append(f"another {key} on rank 1")
    return wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CHECKS), help="comma-separated checks")
    parser.add_argument("--limit", type=float, default=300, help="seconds for everything")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--run", choices=CHECKS, help="run one check in this process (internal)")
    parser.add_argument(
        "--place", type=Path, help="folder that the processes of a check share (internal)"
    )


def main(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --device cpu")
    if options.run:
        if options.device == "cpu":
            from tools.interpreters.triton_interpreter import prepare

            prepare()
        result = CHECKS[options.run](options.device, options.device == "cpu", options.place)
        options.out.write_text(json.dumps(result))
        return
    deadline = monotonic() + options.limit
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    previous = json.loads(options.out.read_text())["checks"] if options.out.exists() else {}
    record: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "checks": previous}
    for name in options.only.split(","):
        start = monotonic()
        with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
            results = run_check(name, options.device, Path(folder), deadline)
        wrong = [text for run in results for text in run["wrong"]] + compare_processes(
            name, results
        )
        seconds = round(monotonic() - start, 1)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        record_of_check = {"date": date, "seconds": seconds, "wrong": wrong, "runs": results}
        record["checks"][name] = record_of_check
        save(options.out, **record)
        print(f"{name}: {'; '.join(wrong) or 'passed'} ({seconds} s)", flush=True)
    sys.exit(any(check["wrong"] for check in record["checks"].values()))
