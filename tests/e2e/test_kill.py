"""``kill -9`` at random moments loses nothing, and leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.sass.kill_resume import kill_often

from tests.e2e.cli import LAUNCH, ROOT, SMALL, command, environment, nostall

KILLS = 5
"""Those of ``python -m benchmarks run sass.kill_resume`` are many more; CI has to be quick."""


def test_a_killed_search_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    told = kill_often(KILLS, tmp_path, seed=1, per_run=3)
    assert sum(told.kills.values()) == KILLS
    assert told.kills.get("during the search", 0) >= 1
    assert told.finished >= 2
    assert told.improved
    assert told.different == 0


def test_a_run_killed_before_its_first_checkpoint_starts_anew(tmp_path: Path) -> None:
    """On the command line, from its first file to its last."""
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
    alone = nostall(*args[:-5], tmp_path / "alone", *budget)
    for key in ("ratio", "best", "evaluations", "moved", "retimed"):
        assert resumed.json[key] == alone.json[key]


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
    os.kill(worker, 0)  # it is there
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    deadline = time.monotonic() + 20
    while _alive(worker):
        assert time.monotonic() < deadline, "the worker outlived its parent"
        time.sleep(0.05)


def _alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
