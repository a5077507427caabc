"""The examples of training by a plan in a loop of one's own, with torchrun, on gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cli import ROOT, nostall

pytestmark = pytest.mark.slow

pytest.importorskip("torch", reason="training by plans needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="shardings need the extra nostall[sharding]")

EXAMPLES = ROOT / "examples" / "parallel"
MODULE = EXAMPLES / "language_model.py"
CLUSTER = """
name = "processes"
[[servers]]
gpus = {gpus}
memory_gib = 4
link = {{ bandwidth_gbytes = 10, latency_us = 10 }}
"""
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


def plan(folder: Path, gpus: int, *options: object) -> Path:
    """A plan file of a global batch of 32 samples."""
    cluster, path = folder / f"{gpus}.toml", folder / f"{gpus}.json"
    cluster.write_text(CLUSTER.format(gpus=gpus))
    done = nostall(
        "plan", f"{MODULE}:build", "--cluster", cluster, "--global-batch", 32, "--out", path,
        *options, **ENVIRONMENT,
    )  # fmt: skip
    assert done.code == 0, done.err
    return path


def train(example: str, processes: int, *given: object) -> list[float]:
    """Losses that an example prints."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(processes), str(EXAMPLES / f"{example}.py"), *map(str, given),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]


def test_the_examples_train_and_go_on_on_another_number_of_processes(tmp_path: Path) -> None:
    even = ("--planner", "even", "--micro-batch", 8, "--device", "cpu")
    two, four = plan(tmp_path, 2, *even), plan(tmp_path, 4, "--planner", "sharding", "--mesh", "4")
    whole = train("resume", 2, two, tmp_path / "whole", 8)
    assert len(whole) == 8 and whole[-1] < whole[0] - 0.5
    first = train("resume", 2, two, tmp_path / "checkpoints", 4)
    assert first == whole[:4]
    rest = train("resume", 4, four, tmp_path / "checkpoints", 8)
    assert rest == pytest.approx(whole[4:], rel=1e-5)
    plain = train("plain_loop", 2, two)
    assert plain[0] == whole[0] and len(plain) == 8
    assert len(train("accumulate", 4, four)) == 8
