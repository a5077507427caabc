"""Check of PyTorch's operator samples (OpInfo): captured graphs and kernels against PyTorch.

    python -m benchmarks run fusion.opinfo --out OUT [--each 2] [--processes 2]

Takes the first and last ``--each`` samples of every operator and dtype that can be captured
completely.  The graph of a sample, interpreted in fp64, is compared with PyTorch (fp64 and
integers), and its kernels, between guard bands, with the graph.  On a GPU kernels are compiled with
all dtypes; without one they run in Triton's interpreter, without bf16.  OUT is a JSON with the
operators, counts of outcomes and failures.  Exit code 1 if anything is wrong.
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
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from benchmarks.harness.result_file import save

PARTS = 24
"""Number of processes among which the operators are divided, so that each is short."""


def check_part(each: int, folder: Path, part: int) -> dict[str, Any]:
    """Check every ``PARTS``-th operator, from number ``part`` on, in a new process."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.unit.fusion.capture.op_samples"]
    arguments = [str(folder / str(part)), str(each), str(part), str(PARTS)]
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    process = subprocess.run(
        [*command, *arguments],
        env=os.environ | interpreter,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        return {"seen": {}, "operators": [[], []], "wrong": [process.stderr.strip()[-300:]]}
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    print(f"part {part}: {result['seen'].get('kernels', 0)} samples, {len(result['wrong'])} wrong")
    return result


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--each", type=int, default=2, help="samples of each operator and dtype")
    parser.add_argument("--processes", type=int, default=2, help="processes at the same time")


def main(options: argparse.Namespace) -> None:
    if find_spec("expecttest") is None:
        sys.exit("PyTorch's operator samples need expecttest: pip install expecttest")
    start = monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        parts = list(pool.map(partial(check_part, options.each, Path(folder)), range(PARTS)))
    seen: Counter[str] = Counter()
    for part in parts:
        seen.update(part["seen"])
    graphs, kernels = (
        sorted({name for p in parts for name in p["operators"][index]}) for index in (0, 1)
    )
    wrong = [text for part in parts for text in part["wrong"]]
    save(
        options.out,
        how="compiled" if torch.cuda.is_available() else "interpreted",
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        torch=torch.__version__,
        each=options.each,
        seconds=round(monotonic() - start, 1),
        graphs=graphs,
        kernels=kernels,
        seen=dict(sorted(seen.items())),
        wrong=wrong,
    )
    print(
        f"{seen['graphs']} graphs of {len(graphs)} operators and {seen['kernels']} kernels of "
        f"{len(kernels)} operators compared with PyTorch, {len(wrong)} wrong"
    )
    sys.exit(bool(wrong))
