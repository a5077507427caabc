"""Benchmark of optimiser steps: AdamW and clipping by eager PyTorch, torch.compile and nostall.

    python -m benchmarks run fusion.optimizer_steps --out OUT [--seconds 1.5] [--small --device cpu]

The parameters are those of a GPT-2 of a few layers, in fp32.  Each method has its own copy of the
parameters.  Steps are timed in a loop and as CUDA graphs, interleaved, torch.compile twice (the
null).  ``least_bytes`` counts every tensor that a step must read or write once: parameters, both
moments and gradients, and with clipping the gradients once more, because their norm has to be known
before they are scaled.  ``copy_s`` is the time of a copy that moves as many bytes.

OUT has both cases, their samples and the kernels of one step; it is saved after each case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.result_file import save
from benchmarks.torch_compile.model_process import nostall_backend
from benchmarks.torch_compile.step_timing import capture_step, profile_kernels, time_interleaved

CASES = {"AdamW": False, "clipping + AdamW": True}
"""Whether a case clips the norm of the gradients first."""
COMPILED = ("inductor", "nostall")
MAX_CHOICE_SECONDS = 25.0
"""Seconds until the backend has to have chosen a version."""


@dataclass(frozen=True)
class Settings:
    """Settings of the samples."""

    device: str
    measured_s: float


def parameter_shapes(small: bool) -> list[tuple[int, ...]]:
    """Shapes of the parameters of a GPT-2 of four layers, or of a small one."""
    width, vocabulary, layers = (16, 50, 1) if small else (768, 50257, 4)
    layer = [
        *((width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return [(vocabulary, width), (1024, width), *layer * layers, (width,), (width,)]


def make_step(shapes: Sequence[tuple[int, ...]], clip: bool, device: str, fused: bool) -> Any:
    """A function that updates parameters of these shapes in place; equal for each call."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(
        parameters,
        lr=torch.tensor(1e-3, device=device) if on_gpu else 1e-3,
        fused=fused or None,
        foreach=None if fused else True,
        capturable=on_gpu,
    )

    def step() -> None:
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()

    return parameters, step


def least_bytes(shapes: Sequence[tuple[int, ...]], clip: bool) -> int:
    """Bytes that a step moves at least; with clipping the gradients are written, too."""
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    return 4 * elements * (7 + 2 * clip)


def measure_case(clip: bool, options: argparse.Namespace) -> dict[str, Any]:
    """Times, kernels and results of all methods."""
    shapes, device = parameter_shapes(options.small), options.device
    settings = Settings(device, options.seconds)
    steps: dict[str, Callable[[], None]] = {}
    results: dict[str, list[Tensor]] = {}
    reports: list[Any] = []
    seconds = {}
    methods = ["eager", *(["eager, fused"] if device == "cuda" else []), *COMPILED]
    for name in methods:
        parameters, step = make_step(shapes, clip, device, name == "eager, fused")
        step()  # makes the state, so that it is part of no graph
        start = monotonic()
        if name in COMPILED:
            torch._dynamo.reset()
            backend = nostall_backend(device) if name == "nostall" else name
            step = torch.compile(step, backend=backend, dynamic=False)
        step()
        if name == "nostall":
            reports = backend.reports
            _run_until_chosen(step, reports)
        seconds[name] = round(monotonic() - start, 1)
        steps[name], results[name] = step, parameters
    looped = time_interleaved(steps, settings, "inductor")
    record: dict[str, Any] = {
        "tensors": len(shapes),
        "least_bytes": least_bytes(shapes, clip),
        "seconds_to_first_choice": seconds,
        "looped": looped,
        "reports": [report.explain() for report in reports],
        "apart": _difference(shapes, clip, device),
    }
    if device == "cuda":
        captured, failed = {}, {}
        for name, step in steps.items():
            try:
                captured[name] = capture_step(step).replay
            except Exception as error:  # the other methods are measured
                failed[name] = f"{type(error).__name__}: {error}"[:300]
        record["replayed"] = time_interleaved(captured, settings, "inductor")
        record["not_captured"] = failed
        record["kernels"] = {name: profile_kernels(step) for name, step in steps.items()}
        source = torch.empty(record["least_bytes"] // 2, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        copies = {"copy": partial(target.copy_, source)}
        record["copy"] = time_interleaved(copies, settings)["samples_s"]["copy"]
    return record


def _run_until_chosen(step: Callable[[], None], reports: Sequence[Any]) -> None:
    deadline = monotonic() + MAX_CHOICE_SECONDS
    while not all(report.reason for report in reports) and monotonic() < deadline:
        step()


def _difference(shapes: Sequence[tuple[int, ...]], clip: bool, device: str) -> float:
    """Largest difference of a parameter after two steps by nostall from those of eager PyTorch."""
    expected, eager = make_step(shapes, clip, device, False)
    actual, step = make_step(shapes, clip, device, False)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=nostall_backend(device), dynamic=False)
    for _ in range(3):
        eager()
        compiled()
    pairs = zip(actual, expected, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="seconds for each set of samples"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small parameters, for tests")


def main(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --small --device cpu")
    cases: dict[str, Any] = {}
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    for name, clip in CASES.items():
        cases[name] = measure_case(clip, options)
        save(options.out, kind="measured", gpu=gpu, torch=torch.__version__, cases=cases)
        print(summary_line(name, cases[name]), flush=True)


def summary_line(name: str, case: dict[str, Any]) -> str:
    """Microseconds of each method and of the copy of as many bytes."""
    clock = case.get("replayed") or case["looped"]
    times = {key: sorted(row)[len(row) // 2] for key, row in clock["samples_s"].items()}
    if "copy" in case:
        times["copy"] = sorted(case["copy"])[len(case["copy"]) // 2]
    text = ", ".join(f"{key} {1e6 * value:.1f} us" for key, value in times.items())
    launches = {key: row.get("launches") for key, row in case.get("kernels", {}).items()}
    return f"{name}: {text}; launches {launches}; apart {case['apart']}; {case['reports']}"
