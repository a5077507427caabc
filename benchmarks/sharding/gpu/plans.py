"""Predicted and measured steps of sharding plans on the GPUs of one host, beside PyTorch's peers.

    NCCL_NVLS_ENABLE=0 python -m benchmarks run sharding.gpu_plans --gpus 4 --out OUT.json
    python -m benchmarks run sharding.gpu_plans --gpus 2 --device cpu --tiny --out OUT.json

First the collectives and the rates of a GPU are measured; predictions use these.  Then plans are
made for a GPT and a wide classifier: those of rules, of mixed rules and of the planner, on one and
two mesh dimensions.  Each plan runs, and so do DDP, FSDP2 and tensor parallelism written by hand; a
step is a forward and a backward pass without the optimiser.  Loss and gradients of each plan are
compared with those of one process.  Plans run as CUDA graphs; how long the processor takes to
launch them operator by operator is measured beside it.

Plans that OUT.json already has are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.sharding.gpu.results import print_table

GRACE_S = 20.0
"""Seconds after the time limit in which the ranks may end by themselves."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_run_options(parser)
    parser.add_argument(
        "--graphs", action=argparse.BooleanOptionalAction, default=True,
        help="run plans as CUDA graphs",
    )  # fmt: skip


def main(given: argparse.Namespace) -> None:
    run_ranks(given, "benchmarks.sharding.gpu.rank")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options of a run, of plans or of hybrids."""
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="narrow models in single precision")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=210.0, help="no plan begins later")
    parser.add_argument("--planning-seconds", type=float, default=20.0, help="limit of one plan")
    parser.add_argument("--out", type=Path, required=True)


def run_ranks(given: argparse.Namespace, module: str) -> None:
    """Run a module in one process for each GPU, then print the records of the result file."""
    options = {k: v for k, v in vars(given).items() if isinstance(v, str | int | float)}
    ranks = _start(module, options, given.gpus, given.out.resolve())
    until = monotonic() + given.seconds + GRACE_S
    while monotonic() < until and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):  # the others would wait for it
            sleep(2.0)
            break
        sleep(0.2)
    failed = [number for number, rank in enumerate(ranks) if rank.poll() != 0]
    for rank in ranks:
        rank.kill()
        rank.wait()
    if given.out.exists():
        body = json.loads(given.out.read_text())
        print_table(body["records"], body["summary"])
    if failed:
        raise SystemExit(f"ranks {failed} failed or exceeded the time limit; run it again to go on")


def _start(
    module: str, options: dict[str, Any], count: int, out: Path
) -> list[subprocess.Popen[bytes]]:
    """One process for each GPU; all but rank 0 print nothing but errors."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", module, str(out)]
    ranks = []
    for rank in range(count):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": count,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "NCCL_NVLS_ENABLE": 0,
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": 1,
            "CUDA_DEVICE_MAX_CONNECTIONS": 32,
            "NCCL_GRAPH_REGISTER": 0,  # it would register each buffer of each graph
            "NOSTALL_OPTIONS": json.dumps(options),
        }
        environment = {**os.environ, **{k: str(v) for k, v in variables.items()}}
        ranks.append(subprocess.Popen(command, env=environment))
    return ranks
