"""PyTorch's own samples of operators (OpInfo), as graphs beside PyTorch and as kernels.

    python -m benchmarks run fusion.opinfo --out OUT [--each 2] [--processes 2]

``--each`` samples of every operator and dtype, the first and the last ones.  A sample all of whose
calls are operators of ours counts: its graph, interpreted in fp64, is compared with PyTorch (fp64
and integers), its kernels with the graph, between guard bands.  Where there is a GPU kernels are
compiled and all dtypes take part; elsewhere they are interpreted, without bf16.  OUT is a JSON with
the operators, how many samples came to what, and what is wrong; exit code 1 where anything is.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.harness.result_file import save

PARTS = 24
"""Processes, one after the other, that share the operators: none of them runs for long."""


def told(each: int, folder: Path, part: int) -> dict[str, Any]:
    """What a process of its own says of every ``PARTS``-th operator."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.fusion.capture.op_samples"]
    given = [str(folder / str(part)), str(each), str(part), str(PARTS)]
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, *given], env=os.environ | mode, capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"seen": {}, "operators": [[], []], "wrong": [done.stderr.strip()[-300:]]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"part {part}: {found['seen'].get('kernels', 0)} samples, {len(found['wrong'])} wrong")
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=2, help="samples of an operator and dtype")
    parser.add_argument("--processes", type=int, default=2)


def main(options: argparse.Namespace) -> None:
    started = monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        parts = list(pool.map(partial(told, options.each, Path(folder)), range(PARTS)))
    seen: Counter[str] = Counter()
    for part in parts:
        seen.update(part["seen"])
    graphs, kernels = (sorted({n for p in parts for n in p["operators"][at]}) for at in (0, 1))
    wrong = [text for part in parts for text in part["wrong"]]
    save(
        options.out,
        how="compiled" if torch.cuda.is_available() else "interpreted",
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        torch=torch.__version__,
        each=options.each,
        seconds=round(monotonic() - started, 1),
        graphs=graphs,
        kernels=kernels,
        seen=dict(sorted(seen.items())),
        wrong=wrong,
    )
    print(
        f"{seen['graphs']} samples of {len(graphs)} operators beside PyTorch, {seen['kernels']} of "
        f"{len(kernels)} as kernels, {len(wrong)} wrong"
    )
    sys.exit(bool(wrong))
