"""Agreement of the measured GPU times with HolisticTraceAnalysis (HTA) on public traces.

NOSTALL_PUBLIC_TRACES=DIR NOSTALL_HTA_PYTHON=PYTHON \\
    python -m benchmarks run workload.hta --out benchmarks/workload/results/hta.json

DIR contains traces of the tests of HTA (facebookresearch/HolisticTraceAnalysis, tests/data, MIT).
PYTHON is an interpreter of a separate environment with HolisticTraceAnalysis==0.5.0, because it
pins other versions of its dependencies.  HTA includes the last profiler step and analyses the whole
trace, so recorded steps are ignored here, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.result_file import save
from benchmarks.workload.public_traces import answer, traces_and_python
from nostall.core.errors import BadTrace
from nostall.workload.timeline.analysis import build_timelines
from nostall.workload.timeline.intervals import Intervals
from nostall.workload.traces.kineto.reader import read_kineto
from nostall.workload.traces.recording import ActivityType
from nostall.workload.traces.work_kinds import WorkKind, work_kinds

HTA_SCRIPT = """
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


def nostall_times(path: Path) -> tuple[int, dict[str, float]] | None:
    """(rank, times in the whole trace); None for traces without a rank or with several GPUs."""
    try:
        recording = read_kineto(path)
    except BadTrace:
        return None
    recording = dataclasses.replace(recording, steps=np.empty((0, 2)))
    timelines = build_timelines(recording)
    if recording.rank is None or len(timelines) != 1:
        return None
    activities = recording.activities
    kinds = work_kinds(activities, recording.names)
    # HTA does not count copies and memsets as computation.
    rows = (activities.type == ActivityType.KERNEL) & (kinds != WorkKind.COMMUNICATION)
    computing = Intervals.union(activities.start[rows], activities.end[rows]).length
    [timeline] = timelines
    return recording.rank, {
        "total_us": timeline.span * 1e6,
        "idle_us": timeline.idle * 1e6,
        "compute_us": computing * 1e6,
        "overlap": timeline.overlap if timeline.communication else float("nan"),
    }


def hta_times(python: str, path: Path, rank: int) -> dict[str, Any] | str:
    """The times of HTA, or the error if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        shutil.copy(path, copy)
        return answer(python, HTA_SCRIPT, [str(copy), str(rank), folder])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    paths, python = traces_and_python("HolisticTraceAnalysis", "NOSTALL_HTA_PYTHON")
    records = []
    for path in paths:
        if (rank_and_times := nostall_times(path)) is None:
            continue
        rank, own_times = rank_and_times
        reference = hta_times(python, path, rank)
        record: dict[str, Any] = {"trace": path.name, "nostall": _rounded(own_times)}
        if isinstance(reference, str):
            record["hta_failed"] = reference
        else:
            record |= {"hta": _rounded(reference), **_differences(own_times, reference)}
        records.append(record)
        print(record)
    save(options.out, kind="measured", records=records)


def _differences(own_times: dict[str, float], reference: dict[str, Any]) -> dict[str, Any]:
    """Differences as shares of the total time, and the difference of the overlaps."""
    differences: dict[str, Any] = {
        "difference_of_total": {
            key: round((own_times[key] - reference[key]) / own_times["total_us"], 5)
            for key in ("total_us", "idle_us", "compute_us")
        }
    }
    overlap = reference["overlap"]
    if overlap is not None and not math.isnan(overlap):
        differences["difference_of_overlap"] = round(own_times["overlap"] - overlap, 5)
    return differences


def _rounded(values: dict[str, Any]) -> dict[str, float | None]:
    """Values with four digits; None for NaN."""
    return {k: None if v != v else round(v, 4) for k, v in values.items()}
