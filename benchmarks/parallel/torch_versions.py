"""Losses and gradients of all kinds of plans on the installed PyTorch, compared with one process.

    python -m benchmarks run parallel.torch_versions --out OUT_DIR

Runs the cases of tests/unit/parallel/ranks.py on four gloo processes on the CPU in double
precision: all orders, the engines p2p and torch, uneven slices, recomputation, a residual network,
and GPT-2 if transformers is installed.  Writes OUT_DIR/parallel_torch_VERSION.json (measured).  The
exit code is 1 if a case differs.
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
from nostall.parallel.execute.engines.torch_internals import missing_part

LOSS_TOLERANCE = 1e-9
TIMEOUT_S = 540


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
            timeout=TIMEOUT_S,
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
    print(f"torch {version}: {same} of {len(records)} plans agree with one process")
    sys.exit(0 if same == len(records) and done.returncode == 0 else 1)


def _record(path: Path, case: Case) -> dict[str, Any]:
    """Worst relative errors of a case; the test writes ``worst_gradient`` in units of 1e-9."""
    settings: dict[str, Any] = {"case": case.name, "engine": case.engine, "policy": case.policy}
    if not path.exists():
        return {**settings, "same": False, "why": "the case did not run"}
    result = json.loads(path.read_text())
    pairs = zip(result["losses"], result["reference_losses"], strict=True)
    loss_error = max(abs(a / b - 1) for a, b in pairs)
    is_complete = result["engine"] == case.engine and len(result["losses"]) == STEPS
    same = is_complete and loss_error <= LOSS_TOLERANCE and result["worst_gradient"] <= 1
    return {
        **settings,
        "same": same,
        "loss_error": loss_error,
        "gradient_error": result["worst_gradient"] * LOSS_TOLERANCE,
    }
