"""Run Nsight Compute (ncu) and parse its counters; used by workload.gpu and fusion.dram_traffic."""

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

NCU_PATHS = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
READ, WRITTEN, TIME = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"


def find_ncu() -> str | None:
    """Path of ncu: on the PATH, or where CUDA and Nsight Compute install it; else None."""
    path_of_tool = shutil.which("ncu")
    return path_of_tool or next((path for path in NCU_PATHS if Path(path).exists()), None)


def count(ncu: str, model: str, limit: float) -> dict[str, Any]:
    """DRAM bytes and seconds of all kernels of a training step of ``model``, summed by kind.

    ncu does not lock the clocks and does not flush the caches: with a flush, each kernel would read
    from DRAM what the previous kernel left in L2. Raises TimeoutExpired after ``limit`` seconds.
    """
    command = [
        *(ncu, "--clock-control", "none", "--cache-control", "none"),
        *("--profile-from-start", "off", "--csv", "--page", "raw", "--print-units", "base"),
        *("--metrics", ",".join((READ, WRITTEN, TIME)), sys.executable),
        *("-m", "benchmarks.workload.gpu_profile", "--model", model, "--counters"),
    ]
    code, out, errors = run_within(command, limit)
    return {"model": model, "exit_code": code, **sum_by_kind(out.splitlines(), errors)}


def run_within(command: Sequence[str], limit: float) -> tuple[int, str, str]:
    """Run a command; returns its exit code, standard output and standard error.

    After ``limit`` seconds, kills the command with all its child processes and raises
    TimeoutExpired.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, out, errors


def table(
    lines: Sequence[str], errors: str, units: Mapping[str, str | None]
) -> list[dict[str, str]]:
    """Launches of ncu's raw page (CSV), in order of execution.

    ``units``: required columns with their allowed units (empty: any). Raises ValueError if a column
    is missing or has another unit; the text contains the end of ncu's ``errors``.
    """
    csv_lines = [line for line in lines if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(csv_lines))))
    if not rows or any(name not in rows[0] for name in units):
        raise ValueError(f"ncu counted nothing: {' '.join([*lines[-3:], errors.strip()[-300:]])}")
    for name, allowed in units.items():  # the first row of the page has the units
        if allowed and rows[0][name] not in allowed:
            raise ValueError(f"ncu counts {name} in {rows[0][name]}; allowed are {allowed}")
    return rows[1:]


def sum_by_kind(lines: Sequence[str], errors: str) -> dict[str, Any]:
    """Kernels, DRAM bytes and seconds of ncu's raw page, summed by kind of work.

    Raises ValueError if ncu counted nothing.
    """
    units = {"Kernel Name": (), READ: ("byte",), WRITTEN: ("byte",), TIME: ("ns", "nsecond")}
    sums: dict[str, dict[str, float]] = {}
    for row in table(lines, errors, units):
        kind = kernel_work_kind(row["Kernel Name"]).name.lower()
        total = sums.setdefault(kind, {"kernels": 0, "bytes": 0.0, "seconds": 0.0})
        total["kernels"] += 1
        total["bytes"] += number(row[READ]) + number(row[WRITTEN])
        total["seconds"] += number(row[TIME]) * 1e-9
    return {"kinds": sums}


def number(text: str) -> float:
    return float(text.replace(",", ""))
