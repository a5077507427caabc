"""Functions of tensors as users compile them: backend="nostall" beside torch.compile, both clocks.

A step is a call, with a backward pass if inputs have gradients.  Methods are interleaved: the
default mode of torch.compile (the base, which runs twice: the null), its mode
max-autotune-no-cudagraphs if asked for, the backend's own choice, and its stitched version whatever
the times.  The choice is made while the user's steps run, as in a program.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.gpu_lock import gpu_turn, quiet_turn
from benchmarks.torch_compile.model_program import with_own_code
from benchmarks.torch_compile.step_timing import Step, peak_bytes, synchronize, time_interleaved
from nostall.core.errors import one_line

BASE, AUTOTUNED, CHOSEN, FORCED = "compile", "max-autotune", "nostall", "stitched"
"""Names of the methods."""
RUNS = 8
"""Steps in one CUDA graph; one if a step takes longer than :data:`LONG_SECONDS`."""
LONG_SECONDS = 1e-3
CHOICE_SECONDS = 100.0
"""Seconds that the backend may take to choose."""
LARGEST_ERROR = {torch.float32: 1e-3}
"""Error of an output (root mean square, relative) that is always allowed, by dtype."""
LARGEST_ERROR_OTHERS = 2e-2
ERROR_RATIO = 2.0
"""So many times torch.compile's own error is allowed, too, and eager PyTorch's own error: a version
may round where the program's dtypes say so, although torch.compile keeps fp32 there."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """A function, and what makes its inputs on a device; inputs that need gradients are leaves."""

    name: str
    function: Function
    inputs: Callable[[str], Sequence[Tensor]]
    others: Mapping[str, tuple[Function, Callable[[str], Sequence[Tensor]]]] | None = None
    """Further programs, compiled by torch.compile, which users can write in its place."""
    exact: bool = True
    """Whether a reference in fp64 is computed; False for functions that fix their dtypes."""


@dataclass(frozen=True)
class Settings:
    """How a case is measured."""

    device: str = "cuda"
    measured_s: float = 1.0
    """Seconds for each set of samples."""
    autotuned: bool = False
    forced: bool = True
    quiet: bool = False
    """Whether the other children of this process's parent, and theirs, are stopped while times are
    measured: workers of the same benchmark."""


class Program:
    """A compiled function and its inputs."""

    def __init__(self, function: Function, inputs: Sequence[Tensor]) -> None:
        self.function, self.inputs = function, list(inputs)
        self.leaves = [x for x in self.inputs if x.requires_grad]
        self.reports: list[Any] = []
        self._seeds: list[Tensor] = []

    def step(self) -> list[Tensor]:
        """Outputs, then gradients of the leaves."""
        if not self.leaves:
            with torch.no_grad():
                return _tensors(self.function(*self.inputs))
        outputs = _tensors(self.function(*self.inputs))
        differentiable = [x for x in outputs if x.requires_grad]
        if not self._seeds:
            draw = torch.Generator(outputs[0].device).manual_seed(0)
            self._seeds = [
                torch.randn(x.shape, device=x.device, generator=draw).to(x.dtype)
                for x in differentiable
            ]
        gradients = torch.autograd.grad(differentiable, self.leaves, self._seeds, allow_unused=True)
        return [*(x.detach() for x in outputs), *(x for x in gradients if x is not None)]

    def wait(self, device: str) -> None:
        """Steps until the backend has chosen, at most :data:`CHOICE_SECONDS`."""
        end = time.monotonic() + CHOICE_SECONDS
        while time.monotonic() < end and not all(report.reason for report in self.reports):
            with gpu_turn():
                self.step()
                synchronize(device)


def compiled(name: str, function: Function, inputs: Sequence[Tensor]) -> Program:
    """A function by one of the methods."""
    own = with_own_code(function)  # type: ignore[arg-type]
    if name in (CHOSEN, FORCED):
        from nostall.attach.torch_compile.backend import Backend

        backend = Backend()
        options = {"nostall.choose": "stitched"} if name == FORCED else {}
        program = Program(torch.compile(own, backend=backend, options=options), inputs)
        program.reports = backend.reports
        return program
    mode = "max-autotune-no-cudagraphs" if name == AUTOTUNED else None
    return Program(torch.compile(own, mode=mode), inputs)


def measure(case: Case, settings: Settings) -> dict[str, Any]:
    """Errors, choices, peak memory and times of all methods of one case."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    inputs = case.inputs(settings.device)
    record: dict[str, Any] = {"case": case.name, "failed": {}, "methods": {}}
    names = [BASE, CHOSEN]
    names += [FORCED] if settings.forced else []
    names += [AUTOTUNED] if settings.autotuned else []
    made = {name: (name, case.function, inputs) for name in names}
    for name, (function, make) in (case.others or {}).items():
        made[name] = (BASE, function, make(settings.device))
    programs: dict[str, Program] = {}
    for name, how in made.items():
        began = time.monotonic()
        try:
            program = compiled(*how)
            program.step()  # takes no turn: others time while this process compiles
            synchronize(settings.device)
            found = {"first_step_s": round(time.monotonic() - began, 2)}
            program.wait(settings.device)
            found["until_chosen_s"] = round(time.monotonic() - began, 2)
        except Exception as error:  # the other methods are measured
            record["failed"][name] = one_line(error)[:300]
            continue
        programs[name] = program
        record["methods"][name] = found | _report(program)
    with gpu_turn():
        _check(case, settings, programs, record)
    # A graph without a choice goes on to compile, and may wait for another process's file lock.
    has_chosen = record["methods"].get(CHOSEN, {}).get("chosen", True)
    with quiet_turn() if has_chosen and settings.quiet else gpu_turn():
        _time(settings, programs, record)
    gc.collect()
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return record


def _report(program: Program) -> dict[str, Any]:
    if not program.reports:
        return {}
    return {
        "chosen": all(report.reason for report in program.reports),
        "graphs": [
            {
                "state": report.state,
                "reason": report.reason,
                "kernels": report.kernels,
                "left": report.kept_in_inductor,
                "text": str(report),
                "changed": [*report.attention, *report.loss, *report.chunked],
                "unchanged": report.left,
                "blocks": report.blocks_line,
                "memory": report.comparison.memory if report.comparison else "",
                "seconds": {name: round(value, 2) for name, value in report.seconds.items()},
            }
            for report in program.reports
        ],
    }


def _check(
    case: Case, settings: Settings, programs: Mapping[str, Program], record: dict[str, Any]
) -> None:
    """Errors beside the function in fp64, or in fp32 if it has dtypes of its own."""
    try:
        wanted = _reference(case, programs[BASE])
    except Exception as error:  # times are useful without
        record["failed"]["reference"] = one_line(error)[:300]
        return
    for name, program in programs.items():
        if name in (case.others or {}):
            continue
        found = record["methods"][name]
        found["errors"] = [_error(a, b) for a, b in zip(program.step(), wanted, strict=True)]
        if settings.device == "cuda":
            found["peak_bytes"] = peak_bytes(program.step)
    base = record["methods"][BASE]["errors"]
    eager = Program(case.function, programs[BASE].inputs)
    eager._seeds = programs[BASE]._seeds
    own = eager.step()
    record["eager_errors"] = [_error(a, b) for a, b in zip(own, wanted, strict=True)]
    allowed = [
        max(LARGEST_ERROR.get(x.dtype, LARGEST_ERROR_OTHERS), ERROR_RATIO * error, eager_error)
        for x, error, eager_error in zip(own, base, record["eager_errors"], strict=True)
    ]
    for found in record["methods"].values():
        pairs = zip(found.get("errors", ()), allowed, strict=False)
        found["wrong"] = any(not error <= limit for error, limit in pairs)


def _reference(case: Case, base: Program) -> list[Tensor]:
    """Outputs and gradients of the function in eager PyTorch, in fp64 or fp32."""
    dtype = torch.float64 if case.exact else torch.float32
    wide = [
        x.detach().to(dtype).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in base.inputs
    ]
    program = Program(case.function, wide)
    program._seeds = [x.to(dtype) for x in base._seeds]
    return [x.detach() for x in program.step()]


def _error(found: Tensor, wanted: Tensor) -> float:
    """Root mean square of the differences, relative to that of the wanted values."""
    a, b = found.double().flatten(), wanted.double().flatten()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, a - b)
    size = torch.where(b.isfinite(), b, 0.0).square().mean().sqrt().clamp_min(1e-12)
    return float(difference.square().mean().sqrt() / size)


def _time(settings: Settings, programs: Mapping[str, Program], record: dict[str, Any]) -> None:
    """Times in a loop, then on the GPU alone."""
    if BASE not in programs:
        return
    steps: dict[str, Step] = {name: program.step for name, program in programs.items()}
    record["looped"] = time_interleaved(steps, settings, BASE)
    if settings.device != "cuda":
        return
    from nostall.gpu.clock import capture

    is_long = min(map(min, record["looped"]["samples_s"].values())) > LONG_SECONDS
    runs = 1 if is_long else RUNS
    replays: dict[str, Step] = {}
    for name, step in steps.items():
        try:
            replays[name] = capture(step, runs).replay
        except Exception as error:
            record["failed"][f"{name}, CUDA graph"] = one_line(error)[:300]
    if BASE in replays:
        record["replayed"] = time_interleaved(replays, settings, BASE) | {"runs": runs}


def _tensors(result: Any) -> list[Tensor]:
    values = result if isinstance(result, (tuple, list)) else (result,)
    return [x for x in values if isinstance(x, Tensor)]


def summary_line(record: Mapping[str, Any]) -> str:
    """Ratios of both clocks, what was chosen, and what failed, in one line."""
    parts = []
    for name in record["methods"]:
        if name == BASE:
            continue
        ratios = [
            f"{row['ratio']:.3f}"
            for clock in ("looped", "replayed")
            if (row := record.get(clock, {}).get("compared", {}).get(name))
        ]
        parts.append(f"{name} {'/'.join(ratios)}")
    chosen = record["methods"].get(CHOSEN, {})
    states = ",".join(graph["state"] for graph in chosen.get("graphs", ()))
    wrong = [name for name, found in record["methods"].items() if found.get("wrong")]
    text = f"{record['case']}: {'; '.join(parts)} [{states} {chosen.get('until_chosen_s')} s]"
    text += f" WRONG {wrong}" if wrong else ""
    return text + (f" FAILED {record['failed']}"[:200] if record["failed"] else "")
