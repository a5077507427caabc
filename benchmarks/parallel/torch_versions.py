"""Every kind of plan on the installed torch: losses and gradients against one process (measured).

    python -m benchmarks run parallel.torch_versions --out OUT_DIR

Runs the cases of tests/unit/parallel/ranks.py (all orders, engines p2p and torch, uneven slices,
re-computation, a residual network, GPT-2 where transformers is there) on four gloo processes on the
processor, in double precision, and writes OUT_DIR/parallel_torch_VERSION.json.  Exit code 1 where a
case differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.unit.parallel.ranks import CASES, STEPS, Case

from benchmarks.harness.result_file import save
from nostall.parallel.execute.torch_internals import missing_part

LOSS_TOLERANCE = 1e-9
SECONDS = 540


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        done = subprocess.run(
            [sys.executable, "-m", "tests.unit.parallel.ranks", name, "spawn"],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        records = [_record(Path(name) / f"{i}.json", case) for i, case in enumerate(CASES)]
    same = sum(record["same"] for record in records)
    version = torch.__version__
    save(
        options.out / f"parallel_torch_{version.partition('+')[0]}.json",
        kind="measured",
        about={"torch": version, "lacking": missing_part(), "steps": STEPS},
        same=f"{same} of {len(records)}",
        exit_code=done.returncode,
        said=done.stderr[-2000:] if done.returncode else "",
        cases=records,
    )
    print(f"torch {version}: {same} of {len(records)} plans train as one process does")
    sys.exit(0 if same == len(records) and done.returncode == 0 else 1)


def _record(path: Path, case: Case) -> dict[str, Any]:
    """Worst relative error of the losses; ``worst_gradient`` is in units of its tolerance, 1e-9."""
    asked: dict[str, Any] = {"case": case.name, "engine": case.engine, "policy": case.policy}
    if not path.exists():
        return {**asked, "same": False, "why": "it did not run"}
    found = json.loads(path.read_text())
    pairs = zip(found["losses"], found["reference_losses"], strict=True)
    loss = max(abs(a / b - 1) for a, b in pairs)
    ran = found["engine"] == case.engine and len(found["losses"]) == STEPS
    same = ran and loss <= LOSS_TOLERANCE and found["worst_gradient"] <= 1
    return {
        **asked,
        "same": same,
        "loss_error": loss,
        "gradient_error": found["worst_gradient"] * LOSS_TOLERANCE,
    }
