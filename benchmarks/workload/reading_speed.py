"""How fast traces are read, and in how much memory; the trace is made here.

python -m benchmarks run workload.reading_speed --out benchmarks/workload/results/reading_speed.json [--gigabytes 1]

One event in ten is a GPU activity and two in ten are runtime calls, as in the public traces of
training steps; the text is laid out as Kineto writes it.  Rates are per second of processor time,
because the machine may be shared, and per second of the clock.  Two files are also read side by
side, a process each: all events over the time of the slower process.  A small file is read several
times, because processor time too grows when others use the same caches: each rate is kept.
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
from nostall.workload.traces.kineto import read_kineto

HEAD = '{\n  "schemaVersion": 1,\n  "distributedInfo": {"rank": 0, "world_size": 1},\n'


REPEATS = 9
OPERATORS = ("aten::linear", "aten::addmm", "aten::view", "aten::empty", "aten::gelu", "aten::add_")


def pattern(at: int) -> str:
    """Ten events: six operators, two runtime calls, a flow arrow, a kernel."""
    ts, rows = at * 100, []
    for n in range(6):
        dims = {"External id": at * 10 + n, "Input Dims": [[64, 128], [128, 256]], "Ev Idx": n}
        rows.append(("X", "cpu_op", OPERATORS[n], ts + n * 9, 8.5, dims))
    for n in range(2):
        call = {"External id": at * 10, "cbid": 211, "correlation": at * 2 + n}
        rows.append(("X", "cuda_runtime", "cudaLaunchKernel", ts + 60 + n * 5, 3.25, call))
    args = {
        "External id": at * 10, "queued": 0, "device": 0, "context": 1, "stream": 7,
        "correlation": at * 2, "registers per thread": 122, "shared memory": 49152,
        "blocks per SM": 0.59, "warps per SM": 2.37, "grid": [8, 8, 1], "block": [128, 1, 1],
        "est. achieved occupancy %": 4,
    }  # fmt: skip
    name = "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4>(Params)"
    rows.append(("X", "kernel", name, ts + 70, 20.125, args))
    rows.append(("s", "ac2g", "ac2g", ts + 60, 0.0, {}))
    return ",\n".join(
        f'  {{\n    "ph": "{ph}", "cat": "{cat}", "name": "{name}", "pid": 7, "tid": 7,\n'
        f'    "ts": {start}, "dur": {length},\n    "args": {{\n      '
        f"{json.dumps(arguments)[1:-1]}\n    }}\n  }}"
        for ph, cat, name, start, length, arguments in rows
    )


def write(path: Path, size: float) -> None:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as file:
        file.write(HEAD + '  "traceEvents": [\n')
        written = at = 0
        while written < size:
            text = ",\n".join(pattern(at + n) for n in range(100))
            file.write((",\n" if at else "") + text)
            written += len(text)
            at += 100
        file.write('\n  ],\n  "traceName": "made.json"\n}\n')


def measure(path: Path) -> dict[str, Any]:
    clock, processor = time.perf_counter(), time.process_time()
    found = read_kineto(path)
    clock, processor = time.perf_counter() - clock, time.process_time() - processor
    assert found.damage is None and found.left_out == 0
    return {
        "file": path.suffix,
        "file_megabytes": round(path.stat().st_size / 1e6, 1),
        "events": found.events,
        "gpu_activities": len(found.activities),
        "events_per_processor_second": round(found.events / processor),
        "events_per_second": round(found.events / clock),
        "peak_megabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3),
    }


def side_by_side(paths: list[Path]) -> dict[str, Any]:
    """One process a file, as ``nostall characterize --processes`` reads them."""
    with ProcessPoolExecutor(len(paths), get_context("spawn")) as pool:
        own = list(pool.map(measure, paths))
    events = sum(one["events"] for one in own)
    slowest = {
        by: max(one["events"] / one[by] for one in own)
        for by in ("events_per_processor_second", "events_per_second")
    }
    return {
        "file": f"{len(paths)} x {paths[0].suffix}",
        "file_megabytes": sum(one["file_megabytes"] for one in own),
        "events": events,
        **{by: round(events / seconds) for by, seconds in slowest.items()},
        "peak_megabytes": max(one["peak_megabytes"] for one in own),
    }


def repeated(path: Path, times: int) -> dict[str, Any]:
    """The same file again and again: the fastest, and every rate."""
    each = [measure(path) for _ in range(times)]
    fastest = max(each, key=lambda one: one["events_per_processor_second"])
    return {**fastest, "each": [one["events_per_processor_second"] for one in each]}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0)


def main(options: argparse.Namespace) -> None:
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name, share in (("made.json", 1.0), ("made.json.gz", 0.25)):
            path = Path(folder) / name
            write(path, options.gigabytes * 1e9 * share)
            records.append(measure(path))
            print(records[-1])
            path.unlink()
        path = Path(folder) / "small.json"
        write(path, options.gigabytes * 1e9 * 0.05)
        records.append(repeated(path, REPEATS))
        print(records[-1])
        pair = [Path(folder) / f"rank{rank}.json" for rank in range(2)]
        for path in pair:
            write(path, options.gigabytes * 1e9 * 0.25)
        records.append(side_by_side(pair))
        print(records[-1])
    save(options.out, kind="measured", records=records)
