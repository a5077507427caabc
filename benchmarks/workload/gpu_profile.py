"""One model's training step on a GPU: described as a module, timed, profiled; part of workload_gpu.

    python -m benchmarks.workload.gpu_profile --model gpt --out part.json --trace gpt.json.gz
    ncu ... python -m benchmarks.workload.gpu_profile --model gpt --counters

The description never sees the trace.  ``--counters`` runs one step between cudaProfilerStart and
Stop and nothing else, for ncu.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.workload.gpu_models import MODELS, Model, make, train_step
from nostall.workload.modules import module_features
from nostall.workload.timeline.analysis import analyse
from nostall.workload.timeline.kernels import kernel_times
from nostall.workload.traces.amounts import MATMULS
from nostall.workload.traces.kineto import read_kineto

WARM, TIMED, PROFILED = 3, 10, 3
MOST_KERNELS = 40
HOST = ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")
GPU = ("kernel", "gpu_memcpy", "gpu_memset")
ARGUMENTS = (
    *("External id", "Input Dims", "Input type", "correlation", "stream", "device", "bytes"),
    *("grid", "block", "registers per thread", "shared memory", "Collective name"),
    *("In msg nelems", "dtype", "Group size"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--counters", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args()
    model = make(given.model, given.device, given.tiny)
    for _ in range(WARM):
        train_step(model, given.device)
    if given.counters:
        _between_marks(model, given.device)
        return
    body: dict[str, Any] = {"model": given.model, "samples": model.samples}
    body["described"] = described(model, given.device)
    body["seconds"] = timed(model, given.device)
    body["measured"] = profiled(
        lambda: train_step(model, given.device), given.device, given.trace, {}
    )
    given.out.write_text(json.dumps(body))
    print(body["seconds"], body["measured"]["parts_seconds"])


def described(model: Model, device: str) -> dict[str, Any]:
    """What nostall says of the module; computed on fake tensors of that device."""
    batch = {key: value.to(device) for key, value in model.batch.items()}
    return asdict(module_features(model.module, batch, loss=model.loss))


def timed(model: Model, device: str) -> list[float]:
    """Seconds of each of some steps without a profiler."""
    found = []
    for _ in range(TIMED):
        if device == "cuda":
            torch.cuda.synchronize()
        began = perf_counter()
        train_step(model, device)
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(perf_counter() - began)
    return found


def profiled(step: Any, device: str, trace: Path | None, about: dict[str, int]) -> dict[str, Any]:
    """Seconds of each part of a step, measured; ``trace`` gets one step of the recording."""
    activities = [ProfilerActivity.CPU]
    activities += [ProfilerActivity.CUDA] if device == "cuda" else []
    with profile(activities=activities, record_shapes=True) as recorder:
        for number in range(PROFILED):
            with record_function(f"ProfilerStep#{number}"):
                step()
                if device == "cuda":
                    torch.cuda.synchronize()
    total = sum(e.self_device_time_total for e in recorder.key_averages()) * 1e-6
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.json"
        recorder.export_chrome_trace(str(path))
        if device == "cpu":
            _as_if_on_a_gpu(path)
        if trace is not None:
            write_step(json.loads(path.read_text()), trace, about)
        timeline = analyse(read_kineto(path))[0]
    kernels = kernel_times(timeline)
    return {
        "steps": PROFILED,
        "parts_seconds": {k: v / PROFILED for k, v in timeline.parts.items()},
        "communication_seconds": timeline.communication / PROFILED,
        "span_seconds": timeline.span / PROFILED,
        "torch_device_seconds": total / PROFILED,
        "kernels": timeline.kernels / PROFILED,
        "top_kernels": [
            {
                "name": k.name[:160],
                "kind": k.kind.name.lower(),
                "launches": k.launches / PROFILED,
                "seconds": k.seconds / PROFILED,
            }
            for k in kernels[:MOST_KERNELS]
        ],
    }


def write_step(whole: dict[str, Any], path: Path, about: dict[str, int]) -> None:
    """The second step of a trace as a small file: host events in it and what they launched."""
    events = [e for e in whole["traceEvents"] if e.get("ph") == "X"]
    step = next(e for e in events if e.get("name") == "ProfilerStep#1" and e["cat"] in HOST)
    begin, end = step["ts"], step["ts"] + step["dur"]
    # A step ends with a synchronisation, so what it launched runs inside it.
    inside = [e for e in events if begin <= e["ts"] <= end and e["cat"] in (*HOST, *GPU)]
    origin = min(e["ts"] for e in inside)
    small = [_lean(e, origin) for e in inside]
    devices = [
        {"id": d.get("id"), "name": d.get("name")} for d in whole.get("deviceProperties", [])
    ]
    frame = {"schemaVersion": whole.get("schemaVersion", 1)}
    if about:
        frame["distributedInfo"] = about
    body = {**frame, "deviceProperties": devices[:1], "traceEvents": small}
    path.write_bytes(gzip.compress(json.dumps(body, separators=(",", ":")).encode(), mtime=0))


def _lean(event: dict[str, Any], origin: float) -> dict[str, Any]:
    """What nostall and a reader need of an event; shapes of products only."""
    args = {k: v for k, v in event.get("args", {}).items() if k in ARGUMENTS}
    if event["name"] not in MATMULS:
        args = {k: v for k, v in args.items() if not k.startswith("Input")}
    return {
        **{k: event[k] for k in ("ph", "cat", "name", "tid", "dur")},
        "pid": 0,
        "ts": round(event["ts"] - origin, 3),
        "args": args,
    }


def _as_if_on_a_gpu(path: Path) -> None:
    """Trials on a processor: each operator also stands for a kernel, so that parts are found."""
    whole = json.loads(path.read_text())
    made = [
        {**e, "cat": "kernel", "tid": 7, "args": {"stream": 7, "device": 0}}
        for e in whole["traceEvents"]
        if e.get("cat") == "cpu_op"
    ]
    whole["traceEvents"] += made
    path.write_text(json.dumps(whole))


def _between_marks(model: Model, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
    train_step(model, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
