"""What the torch.compile backend promises, held to it on a GPU.

    python -m benchmarks run torch_compile.guarantees --out OUT.json [--only fp8,ranks] [--limit 300]

Results in fp8; dropout's masks in steps and in replays of CUDA graphs; tensors of more than 2^31
elements; batches of many sizes; equal bits in the runs after a choice; two processes of a job that
run what rank 0 has chosen, and two that train by DistributedDataParallel (by NCCL where there are
two GPUs).  Every check is a process of its own with caches of its own
(``benchmarks.torch_compile.guarantee_checks``), so that a fault in one costs only that; ``bits`` are three,
one after the other, with one store.  Checks that OUT has from before stay, unless they are run
again.  Exit code 1 where something is wrong.
``--device cpu`` tries small ones in Triton's interpreter (set TRITON_INTERPRET=1): recorded times
have stitched versions win there.
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
from benchmarks.torch_compile import guarantee_checks as alone
from benchmarks.torch_compile import guarantee_ranks as together

CHECKS: dict[str, Callable[[str, bool, Path], alone.Found]] = {
    "fp8": alone.fp8,
    "dropout": alone.dropout,
    "large": alone.large,
    "varying": alone.varying,
    "bits": alone.bits,
    "ranks": together.ranks,
    "ddp": together.ddp,
}

TIMES = {"bits": 3}
"""Runs of a check, one after the other, with the same caches."""
RANKS = {"ranks": 2, "ddp": 2}
"""Processes of a check that run at the same time."""


def begun(name: str, device: str, place: Path, out: Path, rank: int | None) -> Any:
    """A process that writes there what it found.  Ranks have a store of their own each."""
    caches = place if rank is None else place / str(rank)
    places = {
        "NOSTALL_HOME": str(caches / "home"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "RANK": str(rank or 0),
    }
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks", "run"]
    command += ["torch_compile.guarantees", "--out", str(out), "--run", name]
    command += ["--device", device, "--place", str(place)]
    return subprocess.Popen(
        command, env={**os.environ, **places}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def found(name: str, device: str, place: Path, until: float) -> list[dict[str, Any]]:
    """What the processes of a check found, in order."""
    every: list[dict[str, Any]] = []
    ranks = range(RANKS[name]) if name in RANKS else (None,)
    for turn in range(TIMES.get(name, 1)):
        outs = [place / f"{turn}.{rank}.json" for rank in ranks]
        children = [
            begun(name, device, place, out, rank) for out, rank in zip(outs, ranks, strict=True)
        ]
        for child, out in zip(children, outs, strict=True):
            every.append(ended(child, out, until))
    return every


def ended(child: Any, out: Path, until: float) -> dict[str, Any]:
    try:
        _, said = child.communicate(timeout=max(1.0, until - monotonic()))
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"wrong": ["no time was left"]}
    if child.returncode or not out.exists():
        lines = said.decode(errors="replace").strip().splitlines()
        return {"wrong": [f"exit code {child.returncode}: {' | '.join(lines[-3:])}"]}
    answer: dict[str, Any] = json.loads(out.read_text())
    return answer


def between(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """What is wrong between the processes of a check."""
    wrong = []
    if name == "bits" and len({tuple(run.get("digests", ())) for run in runs}) > 1:
        wrong.append("other bits in another run")
    if name == "bits" and not all(run.get("from store") for run in runs[1:]):
        wrong.append("a later run has chosen again")
    if name in RANKS:
        for key in ("digest", "kernels"):
            one, other = (json.dumps(run.get(key)) for run in runs)
            if one != other:
                wrong.append(f"another {key} on rank 1")
    return wrong


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(CHECKS), help="checks, by name")
    parser.add_argument("--limit", type=float, default=300, help="seconds for everything")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--run", choices=CHECKS, help="do one check in this process")
    parser.add_argument("--place", type=Path, help="a folder that processes of a check share")


def main(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU here; run this on one, or give --device cpu")
    if options.run:
        if options.device == "cpu":
            from nostall.fusion.testing.triton_interpreter import prepare

            prepare()
        answer = CHECKS[options.run](options.device, options.device == "cpu", options.place)
        options.out.write_text(json.dumps(answer))
        return
    until = monotonic() + options.limit
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    known = json.loads(options.out.read_text())["checks"] if options.out.exists() else {}
    record: dict[str, Any] = {"gpu": gpu, "torch": torch.__version__, "checks": known}
    for name in options.only.split(","):
        began = monotonic()
        with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
            runs = found(name, options.device, Path(folder), until)
        wrong = [text for run in runs for text in run["wrong"]] + between(name, runs)
        seconds = round(monotonic() - began, 1)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        checked = {"date": date, "seconds": seconds, "wrong": wrong, "runs": runs}
        record["checks"][name] = checked
        save(options.out, **record)
        print(f"{name}: {'; '.join(wrong) or 'as promised'} ({seconds} s)", flush=True)
    sys.exit(any(one["wrong"] for one in record["checks"].values()))
