"""Agreement with TraceLens (AMD-AGI/TraceLens) on public traces.

NOSTALL_PUBLIC_TRACES=DIR NOSTALL_TRACELENS_PYTHON=PYTHON \\
    python -m benchmarks run workload.tracelens --out benchmarks/workload/results/tracelens.json

DIR holds traces of TraceLens' and HTA's own tests (MIT).  PYTHON is an interpreter with TraceLens
from its repository, in an environment of its own; the package of that name on PyPI is another.
TraceLens looks at the whole trace and at all GPUs in it together; therefore only traces of one GPU
are compared, and so does this comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from nostall.core.errors import BadInput, BadTrace
from nostall.workload.timeline.analysis import analyse
from nostall.workload.traces.kineto import read_kineto

ASK = """
import gzip, json, sys
from TraceLens import PytorchGPUEventAnalyser
with gzip.open(sys.argv[1]) as file:
    events = json.load(file)["traceEvents"]
for number, event in enumerate(events):
    event["UID"] = number
print("ANSWER" + json.dumps(PytorchGPUEventAnalyser(events).compute_metrics()))
"""
COMPARED = {
    "total": "total_time",
    "idle": "idle_time",
    "computing": "computation_time",
    "communication": "total_comm_time",
    "exposed_communication": "exposed_comm_time",
    "exposed_copies": "exposed_memcpy_time",
}


def ours(path: Path) -> dict[str, float] | None:
    """Microseconds of the whole trace; None where it is not of one GPU."""
    try:
        recording = read_kineto(path)
        timelines = analyse(dataclasses.replace(recording, steps=np.empty((0, 2))))
    except BadTrace:
        return None
    if len(timelines) != 1:
        return None
    [only] = timelines
    found = {
        "total": only.span,
        "idle": only.idle,
        "computing": only.parts["compute"] + only.parts["memory"],
        "communication": only.communication,
        "exposed_communication": only.parts["weights"],
        "exposed_copies": only.parts["data"] + only.parts["copies"],
    }
    return {name: seconds * 1e6 for name, seconds in found.items()}


def theirs(python: str, path: Path) -> dict[str, float] | str:
    command = [python, "-c", ASK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    if not lines:
        return (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]
    said = json.loads(lines[0].removeprefix("ANSWER"))
    return {name: float(said[key]) for name, key in COMPARED.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    root, python = (os.environ.get(f"NOSTALL_{n}") for n in ("PUBLIC_TRACES", "TRACELENS_PYTHON"))
    if not root or not python:
        raise BadInput("set NOSTALL_PUBLIC_TRACES and NOSTALL_TRACELENS_PYTHON, as said above")
    records: list[dict[str, Any]] = []
    for path in sorted(Path(root).glob("*.json.gz")):
        if (mine := ours(path)) is None:
            continue
        other = theirs(python, path)
        record: dict[str, Any] = {"trace": path.name, "nostall_us": _rounded(mine)}
        if isinstance(other, str):
            record["tracelens_failed"] = other
        else:
            record["tracelens_us"] = _rounded(other)
            record["difference_of_total"] = {
                name: round((mine[name] - other[name]) / other["total"], 6) for name in COMPARED
            }
        records.append(record)
        print(path.name, record.get("difference_of_total", record.get("tracelens_failed")))
    save(options.out, kind="measured", records=records)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
