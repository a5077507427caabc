"""Runs on one GPU: only one is timed at a time, and none while programs take turns."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

from benchmarks.optimizing.sharing import Gate, descendants

RUN = """
import sys, time
log, times = open(sys.argv[1], "a", buffering=1), open(sys.argv[2], "a", buffering=1)
for phase in range(2):
    print("nostall: x: checking results on copies", file=log)
    time.sleep(0.1)
    print("nostall: x: 9 interleaved blocks of 2 steps", file=log)
    time.sleep(0.3)
    for _ in range(8):
        print(time.monotonic(), file=times)
        time.sleep(0.05)
    print("nostall: x: kept, 2.0 times as fast", file=log)
"""
"""A run whose blocks begin some time after it says so, as the program obeys at its next step."""


def test_runs_are_timed_one_after_the_other(tmp_path: Path) -> None:
    gate, processes, runs = Gate(), [], ExitStack()
    for number in range(3):
        log, times = tmp_path / f"{number}.log", tmp_path / f"{number}.times"
        log.touch()
        words = [sys.executable, "-c", RUN, str(log), str(times)]
        processes.append(subprocess.Popen(words))
        runs.enter_context(gate.run(processes[-1].pid, log))
    time.sleep(0.2)
    with gate.alone():
        begin = time.monotonic()
        time.sleep(0.5)
        end = time.monotonic()
    assert all(process.wait(timeout=60) == 0 for process in processes)
    runs.close()
    gate.close()
    samples = sorted(
        (float(line), number)
        for number in range(3)
        for line in (tmp_path / f"{number}.times").read_text().split()
    )
    assert len(samples) == 48
    assert not [at for at, _ in samples if begin < at < end]
    changes = sum(a[1] != b[1] for a, b in pairwise(samples))
    assert changes <= 5  # six phases, none inside of another


def test_descendants_are_found() -> None:
    inner = "import time; time.sleep(60)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    process = subprocess.Popen([sys.executable, "-c", outer], start_new_session=True)
    try:
        deadline = time.monotonic() + 30
        while not (found := descendants(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(found) == 1
    finally:
        for pid in (process.pid, *descendants(process.pid)):
            subprocess.run(["kill", "-9", str(pid)], check=False)
        process.wait()
