"""One training step of one model: module features, step times, profile; run by ``gpu``.

    python -m benchmarks.workload.gpu_profile --model gpt --out part.json --trace gpt.json.gz
    ncu ... python -m benchmarks.workload.gpu_profile --model gpt --counters

The features are counted on the module alone, without the trace.  ``--counters`` runs one step
between cudaProfilerStart and cudaProfilerStop and nothing else, for ncu.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.workload.feature_records import to_record
from benchmarks.workload.gpu_models import MODELS, Model, build_model, train_step
from nostall.workload.modules import module_features
from nostall.workload.timeline.analysis import build_timelines
from nostall.workload.timeline.kernels import kernel_times
from nostall.workload.traces.kineto.reader import read_kineto
from nostall.workload.traces.operator_cost import MATMULS

WARMUP_STEPS, TIMED_STEPS, PROFILED_STEPS = 3, 10, 3
MAX_KERNELS = 40
"""Kernels in the result file."""
HOST_CATEGORIES = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
STORED_ARGUMENTS = (
    *("External id", "Input Dims", "Input type", "correlation", "stream", "device", "bytes"),
    *("grid", "block", "registers per thread", "shared memory", "Collective name"),
    *("In msg nelems", "dtype", "Group size"),
)
"""Event arguments in the small traces."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--counters", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args()
    device = options.device
    model = build_model(options.model, device, options.tiny)
    for _ in range(WARMUP_STEPS):
        train_step(model, device)
    if options.counters:
        _step_for_counters(model, device)
        return
    body: dict[str, Any] = {"model": options.model, "samples": model.samples}
    body["described"] = features_record(model, device)
    body["seconds"] = step_seconds(model, device)
    body["measured"] = profile_steps(lambda: train_step(model, device), device, options.trace, {})
    options.out.write_text(json.dumps(body))
    print(body["seconds"], body["measured"]["parts_seconds"])


def features_record(model: Model, device: str) -> dict[str, Any]:
    """The features of the module, counted on fake tensors of ``device``."""
    batch = {key: value.to(device) for key, value in model.batch.items()}
    return to_record(module_features(model.module, batch, loss=model.loss))


def step_seconds(model: Model, device: str) -> list[float]:
    """Wall-clock seconds of each of :data:`TIMED_STEPS` steps, without a profiler."""
    seconds = []
    for _ in range(TIMED_STEPS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        train_step(model, device)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return seconds


def profile_steps(
    run_step: Callable[[], None],
    device: str,
    trace_path: Path | None,
    distributed_info: dict[str, int],
) -> dict[str, Any]:
    """Measured seconds per step of each part of a timeline.

    ``trace_path`` gets a small trace of one step, with ``distributed_info`` if it is not empty.
    """
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=activities, record_shapes=True) as profiler:
        for number in range(PROFILED_STEPS):
            with record_function(f"ProfilerStep#{number}"):
                run_step()
                if device == "cuda":
                    torch.cuda.synchronize()
    torch_seconds = sum(e.self_device_time_total for e in profiler.key_averages()) * 1e-6
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.json"
        profiler.export_chrome_trace(str(path))
        if device == "cpu":
            _add_fake_kernels(path)
        if trace_path is not None:
            write_step_trace(json.loads(path.read_text()), trace_path, distributed_info)
        timeline = build_timelines(read_kineto(path))[0]
    kernels = kernel_times(timeline)
    return {
        "steps": PROFILED_STEPS,
        "parts_seconds": {k: v / PROFILED_STEPS for k, v in timeline.parts.items()},
        "communication_seconds": timeline.communication / PROFILED_STEPS,
        "span_seconds": timeline.span / PROFILED_STEPS,
        "torch_device_seconds": torch_seconds / PROFILED_STEPS,
        "kernels": timeline.num_kernels / PROFILED_STEPS,
        "top_kernels": [
            {
                "name": kernel.name[:160],
                "kind": kernel.kind.name.lower(),
                "launches": kernel.launches / PROFILED_STEPS,
                "seconds": kernel.seconds / PROFILED_STEPS,
            }
            for kernel in kernels[:MAX_KERNELS]
        ],
    }


def write_step_trace(trace: dict[str, Any], path: Path, distributed_info: dict[str, int]) -> None:
    """Write the second step of a trace as a small trace of its own."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    step = next(
        e for e in events if e.get("name") == "ProfilerStep#1" and e["cat"] in HOST_CATEGORIES
    )
    start, end = step["ts"], step["ts"] + step["dur"]
    # A step ends with a synchronisation, so its GPU work is inside it.
    categories = (*HOST_CATEGORIES, *GPU_CATEGORIES)
    in_step = [e for e in events if start <= e["ts"] <= end and e["cat"] in categories]
    origin = min(e["ts"] for e in in_step)
    small_events = [_shorten_event(e, origin) for e in in_step]
    devices = [
        {"id": d.get("id"), "name": d.get("name")} for d in trace.get("deviceProperties", [])
    ]
    metadata: dict[str, Any] = {"schemaVersion": trace.get("schemaVersion", 1)}
    if distributed_info:
        metadata["distributedInfo"] = distributed_info
    body = {**metadata, "deviceProperties": devices[:1], "traceEvents": small_events}
    path.write_bytes(gzip.compress(json.dumps(body, separators=(",", ":")).encode(), mtime=0))


def _shorten_event(event: dict[str, Any], origin: float) -> dict[str, Any]:
    """The event with :data:`STORED_ARGUMENTS` only, shapes of matrix products only."""
    args = {k: v for k, v in event.get("args", {}).items() if k in STORED_ARGUMENTS}
    if event["name"] not in MATMULS:
        args = {k: v for k, v in args.items() if not k.startswith("Input")}
    return {
        **{k: event[k] for k in ("ph", "cat", "name", "tid", "dur")},
        "pid": 0,
        "ts": round(event["ts"] - origin, 3),
        "args": args,
    }


def _add_fake_kernels(path: Path) -> None:
    """For test runs on a CPU: add a kernel event per operator, so that the trace has GPU work."""
    trace = json.loads(path.read_text())
    kernels = [
        {**e, "cat": "kernel", "tid": 7, "args": {"stream": 7, "device": 0}}
        for e in trace["traceEvents"]
        if e.get("cat") == "cpu_op"
    ]
    trace["traceEvents"] += kernels
    path.write_text(json.dumps(trace))


def _step_for_counters(model: Model, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    train_step(model, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
