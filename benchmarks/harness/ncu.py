"""What ncu counts of one training step; part of workload_gpu."""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nostall.workload.traces.work_kinds import kernel_work_kind

PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"


def find_ncu() -> str | None:
    found = shutil.which("ncu")
    return found or next((place for place in PLACES if Path(place).exists()), None)


def count(ncu: str, model: str, limit: float) -> dict[str, Any]:
    """DRAM bytes and seconds of every kernel of a step of ``model``, summed by kind.

    Clocks are left as they are, and caches too: flushing them would charge every kernel for what
    the one before left behind.
    """
    command = [
        *(ncu, "--clock-control", "none", "--cache-control", "none"),
        *("--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"),
        *("--metrics", ",".join((READ, WRITTEN, TIME)), sys.executable),
        *("-m", "benchmarks.workload.gpu_profile", "--model", model, "--counters"),
    ]
    code, out, said = run_within(command, limit)
    return {"model": model, "exit_code": code, **summed(out.splitlines(), said)}


def run_within(command: Sequence[str], limit: float) -> tuple[int, str, str]:
    """(exit code, output, errors); past ``limit`` seconds all that the command started is ended."""
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as running:
        try:
            out, said = running.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            raise
        return running.returncode, out, said


def table(lines: Sequence[str], said: str, units: Mapping[str, str | None]) -> list[dict[str, str]]:
    """The launches of ncu's raw page, in their order; ``units``: the columns that have to be there,
    and in what they have to count.  Raises :class:`ValueError` where there is none of it."""
    rows = [line for line in lines if line.startswith('"')]
    found = list(csv.DictReader(io.StringIO("\n".join(rows))))
    if not found or any(name not in found[0] for name in units):
        raise ValueError(f"ncu counted nothing: {' '.join([*lines[-3:], said.strip()[-300:]])}")
    for name, allowed in units.items():
        if allowed and found[0][name] not in allowed:
            raise ValueError(f"ncu counts {name} in {found[0][name]}; it may be {allowed}")
    return found[1:]


def summed(lines: Sequence[str], said: str) -> dict[str, Any]:
    """Sums by kind of ncu's raw page; raises :class:`ValueError` where there is none."""
    units = {"Kernel Name": (), READ: ("byte",), WRITTEN: ("byte",), TIME: ("ns", "nsecond")}
    found: dict[str, dict[str, float]] = {}
    for row in table(lines, said, units):
        kind = kernel_work_kind(row["Kernel Name"]).name.lower()
        one = found.setdefault(kind, {"kernels": 0, "bytes": 0.0, "seconds": 0.0})
        one["kernels"] += 1
        one["bytes"] += number(row[READ]) + number(row[WRITTEN])
        one["seconds"] += number(row[TIME]) * 1e-9
    return {"kinds": found}


def number(text: str) -> float:
    return float(text.replace(",", ""))
