"""One rank of a run is killed: the error, its time after the kill, and the processes that are left.

    python -m benchmarks run parallel.killed_rank --gpus 2 --out OUT.json
    python -m benchmarks run parallel.killed_rank --gpus 2 --device cpu --out OUT.json

Runs ``nostall launch`` by a pipeline plan and by a sharding plan of a small model; the last rank
kills itself when it asks for the batch of its third step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import time
from typing import Any

from benchmarks.harness.result_file import save

DEADLINE_S = 60
"""``--deadline`` of the runs."""
STEP = 3
LIMIT_S = 200.0
_MODULE = """
import os, signal, time
import torch
from pathlib import Path
from nostall.parallel.module import Job

def build():
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8)]
    x = torch.randn(16, 512)

    def batches(step):
        if step == {step} and os.environ.get("RANK") == "{rank}":
            Path({folder!r}, "killed").write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        return (x,), torch.zeros_like(x)

    return Job(torch.nn.Sequential(*layers), (x,), torch.zeros_like(x),
               torch.nn.functional.mse_loss, batches=batches)
"""
_CLUSTER = """
name = "killed"
[[servers]]
gpus = {gpus}
memory_gib = 8
link = {{ bandwidth_gbytes = 300, latency_us = 1 }}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="nostall-killed-") as folder:
        records = [_run(planner, options, Path(folder)) for planner in ("even", "sharding")]
    for record in records:
        print(record)
    save(options.out, kind="measured", gpus=options.gpus, device=options.device,
         deadline_s=DEADLINE_S, records=records)  # fmt: skip


def _run(planner: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rank = options.gpus - 1
    module, cluster = folder / "train.py", folder / "cluster.toml"
    module.write_text(_MODULE.format(step=STEP, rank=rank, folder=str(folder)))
    cluster.write_text(_CLUSTER.format(gpus=options.gpus))
    plan = folder / f"{planner}.json"
    only = ("--mesh", options.gpus) if planner == "sharding" else ("--device", "cpu")
    _nostall("plan", f"{module}:build", "--cluster", cluster, "--planner", planner,
             "--global-batch", 16, *only, "--out", plan, "--quiet")  # fmt: skip
    ended = _nostall("launch", plan, "--device", options.device, "--steps", 100,
                     "--deadline", DEADLINE_S, "--logs", folder / f"logs-{planner}")  # fmt: skip
    end = time()
    killed = float((folder / "killed").read_text())
    return {
        "planner": planner,
        "exit_code": ended.returncode,
        "error": ended.stderr.strip().splitlines()[-1].replace(str(folder), "FOLDER")[:300],
        "seconds_after_kill": round(end - killed, 2),
        "processes_left": _processes_with(str(folder)),
    }


def _nostall(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nostall", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def _processes_with(text: str) -> int:
    """Running processes whose command line contains a text, as that of each rank does."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_own = int(path.parent.name) == os.getpid()
            found += not is_own and text in path.read_text(errors="replace")
        except OSError:  # it has ended
            continue
    return found
