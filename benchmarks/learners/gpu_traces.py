"""Kernels that training steps of the corpus' models launch on a GPU, with their launch parameters.

    python -m benchmarks run learners.gpu_traces \\
        --out benchmarks/learners/results/gpu_traces.json.gz

The models are those of ``learners.corpus`` with random weights and data.  Every other one runs
under autocast to bf16.  One step warms up, the next is recorded by torch.profiler.  Launches of one
kernel with the same parameters are one row; models beyond ``--seconds`` are left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.harness.result_file import save

COLUMNS = ("name", "grid", "block", "registers", "shared_memory", "launches", "microseconds")
"""Columns of ``kernels``; ``name`` is an index of ``names``, times are sums of all launches."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", type=int, default=20, help="models of each kind")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit of the whole run")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: no kernels")
    parser.add_argument("--kinds", nargs="*", help="only these kinds")


def main(options: argparse.Namespace) -> None:
    import torch

    end = time.monotonic() + options.seconds
    torch.set_float32_matmul_precision("high")
    names: dict[str, int] = {}
    models, left_out = [], []
    for label, kind, builder, rng, is_mixed in _models(options.sizes, options.kinds):
        if time.monotonic() > end:
            left_out.append([label, "time"])
            continue
        try:
            events = record(builder, rng, options.device, is_mixed)
        except (RuntimeError, ValueError) as error:  # out of memory, or no autocast of an operator
            left_out.append([label, str(error).splitlines()[0][:200]])
            if "device-side assert" in str(error):
                break  # the process cannot use the GPU any more
            if options.device == "cuda":
                torch.cuda.empty_cache()
            continue
        models.append({"name": label, "kind": kind, "autocast": is_mixed, **compact(events, names)})
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    print(f"{len(models)} models, {len(left_out)} left out, {len(names)} names of kernels")
    save(
        options.out,
        gpu=gpu,
        torch=torch.__version__,
        columns=COLUMNS,
        names=list(names),
        models=models,
        left_out=left_out,
    )


def _models(sizes: int, kinds: Sequence[str] | None) -> Iterator[tuple[str, str, Any, Any, bool]]:
    """(name, kind, builder, generator of its sizes, autocast); each kind in turn."""
    from benchmarks.learners.families.language import LANGUAGE
    from benchmarks.learners.families.other import OTHER
    from benchmarks.learners.families.vision import VISION

    for number in range(sizes):
        for kind, builders in {**LANGUAGE, **VISION, **OTHER}.items():
            if kinds and kind not in kinds:
                continue
            rng = np.random.default_rng([number, *kind.encode()])
            builder = builders[number % len(builders)]
            yield f"{kind}-{number}", kind, builder, rng, number % 4 >= 2


def record(
    builder: Any, rng: np.random.Generator, device: str, is_mixed: bool
) -> list[dict[str, Any]]:
    """Events of one training step."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    torch.manual_seed(0)
    with finite_tensors(), torch.device(device):
        step = builder(rng)

        def run() -> None:
            with torch.autocast(device, torch.bfloat16, enabled=is_mixed):
                loss = step()
            loss.backward()
            if device == "cuda":
                torch.cuda.synchronize()

        run()
        with profile(activities=[activity]) as profiler:
            run()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


@contextmanager
def finite_tensors() -> Iterator[None]:
    """Fill the memory that ``torch.empty`` returns: other contents may be NaN or infinite."""
    import torch
    from torch.utils import _device

    _device._device_constructors()  # cached here: it must name the function that is replaced
    empty = torch.empty

    def filled(*arguments: Any, **options: Any) -> Any:
        tensor = empty(*arguments, **options)
        if tensor.is_floating_point() and not tensor.is_meta:
            with torch.no_grad():
                tensor.uniform_(0.0, 0.05)
        return tensor

    with mock.patch.object(torch, "empty", filled):
        yield


def compact(events: Sequence[dict[str, Any]], names: dict[str, int]) -> dict[str, Any]:
    """Kernels, copies and span of one model; adds the names that are new to ``names``."""
    rows: dict[tuple[Any, ...], list[float]] = {}
    copies: dict[str, list[float]] = {}
    first, last = float("inf"), 0.0
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        first = min(first, event["ts"])
        last = max(last, event["ts"] + event["dur"])
        if category == "kernel":
            arguments = event["args"]
            key = (
                names.setdefault(event["name"], len(names)),
                *(tuple(arguments[part]) for part in ("grid", "block")),
                arguments["registers per thread"],
                arguments["shared memory"],
            )
            total = rows.setdefault(key, [0, 0.0])
        else:
            total = copies.setdefault(event["name"], [0, 0.0])
        total[0] += 1
        total[1] += event["dur"]
    return {
        "microseconds": round(max(0.0, last - first), 1) if rows else 0.0,
        "kernels": [[*key, count, round(time, 2)] for key, (count, time) in rows.items()],
        "copies": {name: [count, round(time, 2)] for name, (count, time) in copies.items()},
    }
