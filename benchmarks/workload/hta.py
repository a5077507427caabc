"""Agreement with HolisticTraceAnalysis on public traces.

NOSTALL_PUBLIC_TRACES=DIR NOSTALL_HTA_PYTHON=PYTHON \\
    python -m benchmarks run workload.hta --out benchmarks/workload/results/hta.json

DIR holds traces of HTA's own tests (facebookresearch/HolisticTraceAnalysis, tests/data, MIT).
PYTHON is an interpreter with HolisticTraceAnalysis==0.5.0: it pins packages of its own, so it lives
in an environment of its own.  HTA is told to keep the last step and looks at the whole trace;
therefore so does this comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from nostall.core.errors import BadInput, BadTrace
from nostall.workload.timeline.analysis import analyse
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.traces.kinds import Kind, kinds
from nostall.workload.traces.kineto import read_kineto

ASK = """
import json, sys
from hta.trace_analysis import TraceAnalysis
t = TraceAnalysis(trace_files={int(sys.argv[2]): sys.argv[1]}, trace_dir=sys.argv[3],
                  include_last_profiler_step=True)
time = t.get_temporal_breakdown(visualize=False).iloc[0]
overlap = t.get_comm_comp_overlap(visualize=False)
print("ANSWER" + json.dumps({
    "total_us": float(time["kernel_time(us)"]), "idle_us": float(time["idle_time(us)"]),
    "compute_us": float(time["compute_time(us)"]),
    "overlap": float(overlap.iloc[0]["comp_comm_overlap_pctg"]) / 100 if len(overlap) else None,
}))
"""


def ours(path: Path) -> tuple[int, dict[str, float]] | None:
    """(rank, figures) of a trace with a rank and one GPU."""
    try:
        recording = read_kineto(path)
    except BadTrace:
        return None
    whole = dataclasses.replace(recording, steps=np.empty((0, 2)))
    timelines = analyse(whole)
    if recording.rank is None or len(timelines) != 1:
        return None
    own, kind = whole.activities, kinds(whole.activities, whole.names)
    # HTA counts memory copies and settings apart from kernels.
    kernel = (own.kind == 0) & (kind != Kind.COMMUNICATION)
    computing = Intervals.union(own.start[kernel], own.end[kernel]).length
    [only] = timelines
    return recording.rank, {
        "total_us": only.span * 1e6,
        "idle_us": only.idle * 1e6,
        "compute_us": computing * 1e6,
        "overlap": only.overlap if only.communication else float("nan"),
    }


def theirs(python: str, path: Path, rank: int) -> dict[str, Any] | str:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        shutil.copy(path, copy)
        command = [python, "-c", ASK, str(copy), str(rank), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER")]
    if not lines:
        return (done.stderr.strip().splitlines() or ["no answer"])[-1][:200]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("ANSWER"))
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    root, python = (os.environ.get(f"NOSTALL_{n}") for n in ("PUBLIC_TRACES", "HTA_PYTHON"))
    if not root or not python:
        raise BadInput("set NOSTALL_PUBLIC_TRACES and NOSTALL_HTA_PYTHON, as said above")
    records = []
    for path in sorted(Path(root).glob("*.json.gz")):
        if (read := ours(path)) is None:
            continue
        rank, mine = read
        other = theirs(python, path, rank)
        record: dict[str, Any] = {"trace": path.name, "nostall": _rounded(mine)}
        if isinstance(other, str):
            record["hta_failed"] = other
        else:
            record["hta"] = _rounded(other)
            record["difference_of_total"] = {
                key: round((mine[key] - other[key]) / mine["total_us"], 5)
                for key in ("total_us", "idle_us", "compute_us")
            }
            if other["overlap"] is not None and not math.isnan(other["overlap"]):
                record["difference_of_overlap"] = round(mine["overlap"] - other["overlap"], 5)
        records.append(record)
        print(record)
    save(options.out, kind="measured", records=records)


def _rounded(values: dict[str, Any]) -> dict[str, float | None]:
    return {k: None if v != v else round(v, 4) for k, v in values.items()}
