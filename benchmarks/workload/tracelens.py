"""Agreement of the measured GPU times with TraceLens (AMD-AGI/TraceLens) on public traces.

NOSTALL_PUBLIC_TRACES=DIR NOSTALL_TRACELENS_PYTHON=PYTHON \\
    python -m benchmarks run workload.tracelens --out benchmarks/workload/results/tracelens.json

DIR contains traces of the tests of TraceLens and HTA (MIT).  PYTHON is an interpreter of a separate
environment with TraceLens from its repository; the package "TraceLens" on PyPI is another project.
TraceLens analyses the whole trace and all GPUs in it together.  Therefore only traces of one GPU
are compared, without regard to recorded steps.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.workload.public_traces import answer, traces_and_python
from nostall.core.errors import BadTrace
from nostall.workload.timeline.analysis import build_timelines
from nostall.workload.traces.kineto.reader import read_kineto

TRACELENS_SCRIPT = """
import gzip, json, sys
from TraceLens import PytorchGPUEventAnalyser
with gzip.open(sys.argv[1]) as file:
    events = json.load(file)["traceEvents"]
for number, event in enumerate(events):
    event["UID"] = number
print("ANSWER" + json.dumps(PytorchGPUEventAnalyser(events).compute_metrics()))
"""
TRACELENS_NAMES = {
    "total": "total_time",
    "idle": "idle_time",
    "computing": "computation_time",
    "communication": "total_comm_time",
    "exposed_communication": "exposed_comm_time",
    "exposed_copies": "exposed_memcpy_time",
}
"""TraceLens's name of each compared time."""


def nostall_times(path: Path) -> dict[str, float] | None:
    """Microseconds in the whole trace; None if it cannot be read or has several GPUs."""
    try:
        recording = read_kineto(path)
        timelines = build_timelines(dataclasses.replace(recording, steps=np.empty((0, 2))))
    except BadTrace:
        return None
    if len(timelines) != 1:
        return None
    [timeline] = timelines
    parts = timeline.parts
    times = {
        "total": timeline.span,
        "idle": timeline.idle,
        "computing": parts["compute"] + parts["memory"],
        "communication": timeline.communication,
        "exposed_communication": parts["weights"],
        "exposed_copies": parts["data"] + parts["copies"],
    }
    return {name: seconds * 1e6 for name, seconds in times.items()}


def tracelens_times(python: str, path: Path) -> dict[str, float] | str:
    """Microseconds in the whole trace, or the error if TraceLens fails."""
    found = answer(python, TRACELENS_SCRIPT, [str(path)])
    if isinstance(found, str):
        return found
    return {name: float(found[key]) for name, key in TRACELENS_NAMES.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    paths, python = traces_and_python("TraceLens", "NOSTALL_TRACELENS_PYTHON")
    records: list[dict[str, Any]] = []
    for path in paths:
        if (own_times := nostall_times(path)) is None:
            continue
        reference = tracelens_times(python, path)
        record: dict[str, Any] = {"trace": path.name, "nostall_us": _rounded(own_times)}
        if isinstance(reference, str):
            record["tracelens_failed"] = reference
        else:
            record["tracelens_us"] = _rounded(reference)
            record["difference_of_total"] = {
                name: round((own_times[name] - reference[name]) / reference["total"], 6)
                for name in TRACELENS_NAMES
            }
        records.append(record)
        print(path.name, record.get("difference_of_total", record.get("tracelens_failed")))
    save(options.out, kind="measured", records=records)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}
