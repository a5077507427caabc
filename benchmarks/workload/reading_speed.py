"""Speed and peak memory of reading Kineto traces, measured on generated traces.

    python -m benchmarks run workload.reading_speed --gigabytes 1 \\
        --out benchmarks/workload/results/reading_speed.json

One event in ten is a GPU activity and two in ten are runtime calls, as in public traces of training
steps; the text has the layout of Kineto.  Rates are events per second of CPU time, because the
machine may be shared, and per second of wall-clock time.  Two files are also read in parallel by
one process each; that rate is all events over the time of the slower process.  A small file is read
several times and all rates are stored, because other load on the caches also increases CPU time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.harness.result_file import save
from nostall.workload.traces.kineto.reader import read_kineto

TRACE_START = '{\n  "schemaVersion": 1,\n  "distributedInfo": {"rank": 0, "world_size": 1},\n'
REPEATS = 9
"""Times that the small file is read."""
OPERATORS = ("aten::linear", "aten::addmm", "aten::view", "aten::empty", "aten::gelu", "aten::add_")


def ten_events(number: int) -> str:
    """JSON of ten events: six operators, two runtime calls, a kernel and a flow arrow."""
    ts, rows = number * 100, []
    for n in range(6):
        arguments = {
            "External id": number * 10 + n,
            "Input Dims": [[64, 128], [128, 256]],
            "Ev Idx": n,
        }
        rows.append(("X", "cpu_op", OPERATORS[n], ts + n * 9, 8.5, arguments))
    for n in range(2):
        arguments = {"External id": number * 10, "cbid": 211, "correlation": number * 2 + n}
        rows.append(("X", "cuda_runtime", "cudaLaunchKernel", ts + 60 + n * 5, 3.25, arguments))
    arguments = {
        "External id": number * 10, "queued": 0, "device": 0, "context": 1, "stream": 7,
        "correlation": number * 2, "registers per thread": 122, "shared memory": 49152,
        "blocks per SM": 0.59, "warps per SM": 2.37, "grid": [8, 8, 1], "block": [128, 1, 1],
        "est. achieved occupancy %": 4,
    }  # fmt: skip
    name = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(Params)"
    rows.append(("X", "kernel", name, ts + 70, 20.125, arguments))
    rows.append(("s", "ac2g", "ac2g", ts + 60, 0.0, {}))
    return ",\n".join(
        f'  {{\n    "ph": "{ph}", "cat": "{cat}", "name": "{name}", "pid": 7, "tid": 7,\n'
        f'    "ts": {start}, "dur": {length},\n    "args": {{\n      '
        f"{json.dumps(arguments)[1:-1]}\n    }}\n  }}"
        for ph, cat, name, start, length, arguments in rows
    )


def write_trace(path: Path, size: float) -> None:
    """Write a trace of about ``size`` bytes before compression."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(TRACE_START + '  "traceEvents": [\n')
        written = number = 0
        while written < size:
            text = ",\n".join(ten_events(number + n) for n in range(100))
            file.write((",\n" if number else "") + text)
            written += len(text)
            number += 100
        file.write('\n  ],\n  "traceName": "made.json"\n}\n')


def measure(path: Path) -> dict[str, Any]:
    """Read one trace in this process."""
    start, cpu_start = time.perf_counter(), time.process_time()
    recording = read_kineto(path)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert recording.remarks == ()
    return {
        "file": path.suffix,
        "file_megabytes": round(path.stat().st_size / 1e6, 1),
        "events": recording.events,
        "gpu_activities": len(recording.activities),
        "events_per_processor_second": round(recording.events / cpu_seconds),
        "events_per_second": round(recording.events / seconds),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def measure_in_parallel(paths: list[Path]) -> dict[str, Any]:
    """Read each file in a process of its own, as ``nostall characterize --processes``."""
    with ProcessPoolExecutor(len(paths), get_context("spawn")) as pool:
        files = list(pool.map(measure, paths))
    events = sum(file["events"] for file in files)
    slowest_seconds = {
        rate: max(file["events"] / file[rate] for file in files)
        for rate in ("events_per_processor_second", "events_per_second")
    }
    return {
        "file": f"{len(paths)} x {paths[0].suffix}",
        "file_megabytes": sum(file["file_megabytes"] for file in files),
        "events": events,
        **{rate: round(events / seconds) for rate, seconds in slowest_seconds.items()},
        "peak_megabytes": max(file["peak_megabytes"] for file in files),
    }


def measure_repeatedly(path: Path, repeats: int) -> dict[str, Any]:
    """Read a file several times: the result of the fastest run, and the rates of all runs."""
    runs = [measure(path) for _ in range(repeats)]
    fastest = max(runs, key=lambda run: run["events_per_processor_second"])
    return {**fastest, "each": [run["events_per_processor_second"] for run in runs]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0)


def main(options: argparse.Namespace) -> None:
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name, share in (("made.json", 1.0), ("made.json.gz", 0.25)):
            path = Path(folder) / name
            write_trace(path, options.gigabytes * 1e9 * share)
            records.append(measure(path))
            print(records[-1])
            path.unlink()
        path = Path(folder) / "small.json"
        write_trace(path, options.gigabytes * 1e9 * 0.05)
        records.append(measure_repeatedly(path, REPEATS))
        print(records[-1])
        paths = [Path(folder) / f"rank{rank}.json" for rank in range(2)]
        for path in paths:
            write_trace(path, options.gigabytes * 1e9 * 0.25)
        records.append(measure_in_parallel(paths))
        print(records[-1])
    save(options.out, kind="measured", records=records)
