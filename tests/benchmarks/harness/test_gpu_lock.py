"""Turns of benchmark processes on one GPU."""

import subprocess
import sys
from pathlib import Path

from benchmarks.harness import gpu_lock

WORKER = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.harness.gpu_lock import quiet_turn

def state(process):
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]

if len(sys.argv) == 1:
    own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    subprocess.run([sys.executable, __file__, str(other.pid)], check=True)
    own.communicate(b"\\n"); other.communicate(b"\\n")
else:
    with quiet_turn():
        time.sleep(0.02)
        print(state(sys.argv[1]))
    time.sleep(0.02)
    print(state(sys.argv[1]) != "T")
"""


def test_other_workers_stand_still_in_a_quiet_turn(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, str(script)],
        env={gpu_lock.LOCK_VARIABLE: str(tmp_path / "lock"), "PYTHONPATH": str(root)},
        capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert found.stdout.split() == ["T", "True"]
