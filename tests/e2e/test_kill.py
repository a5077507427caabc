"""SIGKILL at random times: a resumed search has the same result, and no worker stays alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.sass.robustness.kill_resume import kill_often

from tests.e2e.cli import LAUNCH, ROOT, SMALL, command, environment, nostall

KILLS = 5
"""Kills in this test; ``python -m benchmarks run sass.kill_resume`` does many more."""


@pytest.mark.slow
def test_a_killed_and_resumed_search_has_the_same_result(tmp_path: Path) -> None:
    result = kill_often(KILLS, tmp_path, seed=1, per_run=3)
    assert sum(result.kills.values()) == KILLS
    assert result.kills.get("during the search", 0) >= 1
    assert result.finished >= 2
    assert result.improved
    assert result.different == 0


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    out, budget = tmp_path / "run", ["--evaluations", 60, "--format", "json"]
    args = ["tune", SMALL, "--launch", LAUNCH, "--out", out, *budget]
    process = subprocess.Popen(command(*args), stdout=subprocess.DEVNULL, env=environment())
    while not (out / "run.json").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.wait()
    assert (out / "original.cubin").read_bytes() == SMALL.read_bytes()
    resumed = nostall("tune", "--resume", out, "--format", "json")
    assert resumed.code == 0, resumed.err
    uninterrupted = nostall(*args[:-5], tmp_path / "uninterrupted", *budget)
    for key in ("ratio", "best", "evaluations", "moved", "retimed"):
        assert resumed.json[key] == uninterrupted.json[key]


_PARENT = """
import sys, time
from nostall.core import LaunchSpec
from nostall.gpu import Kernel, LocalGpu
from tests.unit.gpu.test_worker import make_fake
if __name__ == "__main__":
    gpu = LocalGpu(Kernel(b"", "k", LaunchSpec()), make=make_fake)
    print(gpu.info["process"], flush=True)
    time.sleep(120)
"""


def test_the_gpu_worker_ends_with_its_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(PYTHONPATH=paths),
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    os.kill(worker, 0)  # raises OSError if the worker does not exist
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while _is_alive(worker):
        assert time.monotonic() < deadline, "the worker is alive after its parent"
        time.sleep(0.05)


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
