"""Benchmark of optimiser steps by eager PyTorch, torch.compile and nostall.

    python -m benchmarks run fusion.optimizer_steps --out OUT [--seconds 1.0] [--cases NAME ...]
        [--methods NAME ...] [--limit SECONDS] [--warm] [--small --device cpu]

:mod:`~benchmarks.fusion.optimizer_cases` has the steps.  Each method has its own copy of the
tensors.  ``nostall`` is the version that its measured choice runs, ``stitched`` the one with
kernels over lists in any case.  Steps are timed in a loop and as CUDA graphs, interleaved,
torch.compile twice (the null).  ``copy`` is the time of a copy that moves ``least_bytes``.

OUT has the cases, their samples and the kernels of one step; it is saved after each method, and a
complete case is not measured again.  ``--warm`` compiles in one process for each case and
measures nothing, so that a later run finds the compiled code in PyTorch's and Triton's caches.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.optimizer_cases import CASES, Case
from benchmarks.harness.result_file import load, save
from benchmarks.torch_compile.model_program import nostall_backend
from benchmarks.torch_compile.step_timing import capture_step, profile_kernels, time_interleaved

COMPILED = ("inductor", "nostall", "stitched")
METHODS = ("eager", "eager, fused", *COMPILED)
MAX_CHOICE_SECONDS = 25.0
"""Seconds until the backend has to have chosen a version."""
STEPS_COMPARED = 3


@dataclass(frozen=True)
class Settings:
    """Settings of the samples."""

    device: str
    measured_s: float


def compiled_step(
    name: str, step: Callable[[], object], device: str
) -> tuple[Callable[[], object], Any]:
    """The step compiled by a method, and nostall's backend (None for Inductor)."""
    torch._dynamo.reset()
    if name == "inductor":
        return torch.compile(step, dynamic=False), None
    backend = nostall_backend(device)
    options = {"nostall.choose": "stitched"} if name == "stitched" else {}
    return torch.compile(step, backend=backend, dynamic=False, options=options), backend


def measure_case(
    case: Case, options: argparse.Namespace, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Times, kernels and results of all methods; passes the record to ``keep`` as it grows."""
    shapes, device = case.shapes(options.small), options.device
    settings = Settings(device, options.seconds)
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    record: dict[str, Any] = {
        "tensors": len(shapes),
        "least_bytes": case.bytes_per_element * elements,
        "seconds_to_first_choice": {},
        "reports": {},
        "apart": {},
    }
    expected, eager = case.make(shapes, device, False)
    for _ in range(STEPS_COMPARED):
        eager()
    steps: dict[str, Callable[[], object]] = {}
    for name in options.methods:
        if name != "eager, fused" or (device == "cuda" and case.has_fused):
            steps[name] = _prepared(name, case, shapes, expected, record, device)
            keep(record)
    base = "inductor" if "inductor" in steps else next(iter(steps))
    record["looped"] = time_interleaved(steps, settings, base)
    keep(record)
    if device == "cuda":
        _measure_on_gpu(steps, record, settings, base)
    keep(record | {"complete": True})


def _prepared(
    name: str,
    case: Case,
    shapes: Sequence[tuple[int, ...]],
    expected: Sequence[Tensor],
    record: dict[str, Any],
    device: str,
) -> Callable[[], object]:
    """The compiled step of a method, which has run; adds what is known of it to the record."""
    start = monotonic()
    changed, step = case.make(shapes, device, name == "eager, fused")
    backend = None
    if name in COMPILED:
        step, backend = compiled_step(name, step, device)
    for _ in range(STEPS_COMPARED):
        step()
    record["apart"][name] = differences(changed, expected)
    if backend is not None:
        _run_until_chosen(step, backend.reports)
        record["reports"][name] = [report.explain() for report in backend.reports]
    record["seconds_to_first_choice"][name] = seconds = round(monotonic() - start, 1)
    print(f"  {name}: ready in {seconds} s, apart {record['apart'][name]}", flush=True)
    return step


def _measure_on_gpu(
    steps: dict[str, Callable[[], object]], record: dict[str, Any], settings: Settings, base: str
) -> None:
    """Add the times of CUDA graphs, the kernels of one step and the time of a copy."""
    captured, failed = {}, {}
    for name, step in steps.items():
        try:
            captured[name] = capture_step(step).replay
        except Exception as error:  # the other methods are measured
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    record["replayed"] = time_interleaved(captured, settings, base)
    record["not_captured"] = failed
    record["kernels"] = {name: profile_kernels(step) for name, step in steps.items()}
    source = torch.empty(record["least_bytes"] // 2, dtype=torch.uint8, device=settings.device)
    copies = {"copy": partial(torch.empty_like(source).copy_, source)}
    record["copy"] = time_interleaved(copies, settings)["samples_s"]["copy"]


def _run_until_chosen(step: Callable[[], object], reports: Sequence[Any]) -> None:
    deadline = monotonic() + MAX_CHOICE_SECONDS
    while not all(report.reason for report in reports) and monotonic() < deadline:
        step()


def differences(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, float]:
    """The largest difference of an element, and the share of elements that are equal."""
    largest, equal, count = 0.0, 0, 0
    for a, b in zip(actual, expected, strict=True):
        apart = (a.detach() != b.detach()) & ~(a.detach().isnan() & b.detach().isnan())
        equal += a.numel() - int(apart.sum())
        count += a.numel()
        if a.numel():
            largest = max(largest, float((a.detach().double() - b.detach().double()).abs().max()))
    return {"largest": largest, "share_equal": equal / max(1, count)}


def warm(names: Sequence[str], options: argparse.Namespace) -> None:
    """Compile the cases in one process each, at the same time."""
    command = [sys.executable, "-m", "benchmarks", "run", "fusion.optimizer_steps"]
    command += ["--out", str(options.out), "--device", options.device, "--warm"]
    command += ["--small"] if options.small else []
    processes = [subprocess.Popen([*command, "--cases", name]) for name in names]
    for process in processes:
        process.wait()


def compile_case(case: Case, options: argparse.Namespace) -> None:
    """Compile a case by Inductor and with kernels over lists, and run a step."""
    for name in ("inductor", "stitched"):
        start = monotonic()
        _, step = case.make(case.shapes(options.small), options.device, False)
        compiled_step(name, step, options.device)[0]()
        print(f"  {name}: compiled in {monotonic() - start:.1f} s", flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds for each set of samples"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true", help="small parameters, for tests")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--limit", type=float, default=3600.0, help="start no case after so long")
    parser.add_argument("--warm", action="store_true", help="compile only, and measure nothing")


def main(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --small --device cpu")
    start = monotonic()
    cases: dict[str, Any] = load(options.out)["cases"] if options.out.exists() else {}
    wanted = [name for name in options.cases if not cases.get(name, {}).get("complete")]
    if options.warm:
        if len(wanted) > 1:
            warm(wanted, options)
        elif wanted:
            compile_case(CASES[wanted[0]], options)
        return
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    for name in wanted:
        if monotonic() - start > options.limit:
            print(f"{name}: not measured, {options.limit:.0f} s are over", flush=True)
            continue

        def keep(record: dict[str, Any], name: str = name) -> None:
            cases[name] = record
            save(options.out, kind="measured", gpu=gpu, torch=torch.__version__, cases=cases)

        print(name, flush=True)
        measure_case(CASES[name], options, keep)
        print(summary_line(name, cases[name]), flush=True)


def summary_line(name: str, case: dict[str, Any]) -> str:
    """Microseconds of each method and of the copy of as many bytes."""
    clock = case.get("replayed") or case["looped"]
    times = {key: sorted(row)[len(row) // 2] for key, row in clock["samples_s"].items()}
    if "copy" in case:
        times["copy"] = sorted(case["copy"])[len(case["copy"]) // 2]
    text = ", ".join(f"{key} {1e6 * value:.1f} us" for key, value in times.items())
    launches = {key: row.get("launches") for key, row in case.get("kernels", {}).items()}
    chosen = [report.splitlines()[0] for report in case["reports"].get("nostall", [])]
    return f"{name}: {text}; launches {launches}; apart {case['apart']}; {chosen}"
