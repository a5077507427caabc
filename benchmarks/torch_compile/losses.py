"""What do losses without logits in memory cost and save?

    python -m benchmarks run torch_compile.losses --out OUT [--cases A,B] [--limit 150]

A case is a product with a loss behind it in bf16: tokens x width x classes. Its step is forward and
backward; only the loss is returned. Methods: torch.compile (the base, which runs twice: the null),
torch.compile with ``auto_chunker`` and ``F.linear_cross_entropy`` where PyTorch has them, eager
PyTorch, Liger's fused loss if ``liger-kernel`` is installed, the chunked operator with several
numbers of chunks, and ``backend="nostall"`` with its own choice (``nostall``) and with
``nostall.loss`` (``chunked``). Times are interleaved, in a loop and as replayed CUDA graphs.
Peak memory is that of a step above what is allocated before, so with the gradients of hidden and
weight. Errors are those of loss and gradients relative to fp64 (root mean square).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.gpu_lock import gpu_turn
from benchmarks.harness.result_file import save
from benchmarks.torch_compile.step_timing import (
    CapturedStep,
    capture_step,
    peak_bytes,
    profile_kernels,
    time_interleaved,
)
from nostall.attach.torch_compile.backend import Backend
from nostall.attach.torch_compile.graph_key import device_name
from nostall.attach.torch_compile.rewrite.compilers import backward_with_forward
from nostall.attach.torch_compile.rewrite.loss import chunk_losses
from nostall.core.errors import one_line

F = torch.nn.functional
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
BASE = "inductor"
CHUNKS = (4, 7, 8, 16)
PROFILED = (BASE, "8 chunks")
SHARES_GPU = True
"""Processes of other benchmarks may run beside this one: each takes turns on the GPU to time."""
MAX_CHOICE_SECONDS = 110.0
"""Seconds that the backend may take to choose."""


@dataclass(frozen=True)
class Case:
    """A product (tokens x width, classes) and its loss."""

    tokens: int
    width: int
    classes: int
    loss: str = "mean"
    label_smoothing: float = 0.0

    @property
    def logits_bytes(self) -> int:
        return 2 * self.tokens * self.classes

    def function(self) -> Loss:
        """The loss as programs write it, with logits converted to fp32."""

        def cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            logits = F.linear(hidden, weight).float()
            return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

        def log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            logits = F.linear(hidden, weight).float()
            known = torch.log_softmax(logits, -1).gather(-1, labels[:, None])[:, 0]
            # Each token has an own weight, as advantages are.
            return -(known * (labels % 7 + 1)).mean()

        return log_probs if self.loss == "log_probs" else cross_entropy


CASES: Mapping[str, Case] = {
    "large": Case(8192, 4096, 128_000),
    "medium": Case(4096, 2048, 50_304),
    "smoothed": Case(8192, 2048, 50_304, label_smoothing=0.1),
    "log-probabilities": Case(8192, 4096, 128_000, loss="log_probs"),
}
SMALL = Case(64, 16, 40)


@dataclass
class Operands:
    """Leaves of a step and their labels."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor

    @classmethod
    def of(cls, case: Case, device: str) -> Operands:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int, scale: float) -> Tensor:
            values = torch.randn(shape, generator=generator, device=device) * scale
            return values.to(torch.bfloat16).requires_grad_()

        labels = torch.randint(case.classes, (case.tokens,), generator=generator, device=device)
        labels[::97] = -100 if case.loss == "mean" else 0
        hidden = normal(case.tokens, case.width, scale=1.0)
        return cls(hidden, normal(case.classes, case.width, scale=case.width**-0.5), labels)

    def step(self, loss: Loss) -> Callable[[], Tensor]:
        """A step that leaves its gradients in the leaves."""

        def run() -> Tensor:
            self.hidden.grad = self.weight.grad = None
            value = loss(self.hidden, self.weight, self.labels)
            value.backward()
            return value.detach()

        return run


def methods(case: Case, device: str) -> dict[str, Callable[[], Loss]]:
    """What makes the function of each method."""
    function = case.function()
    made: dict[str, Callable[[], Loss]] = {
        BASE: lambda: torch.compile(function),
        "eager": lambda: function,
    }
    for count in CHUNKS:
        made[f"{count} chunks"] = lambda count=count: chunked(function, count)
    if hasattr(torch._inductor.config, "auto_chunker"):
        options = {"auto_chunker.enable": True}
        made["auto_chunker"] = lambda: torch.compile(function, options=options)
    built_in = getattr(F, "linear_cross_entropy", None)
    if built_in is not None and case.loss == "mean":

        def own(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return built_in(
                hidden, weight, labels, ignore_index=-100, label_smoothing=case.label_smoothing
            )

        made["F.linear_cross_entropy"] = lambda: own
    if case.loss == "mean" and importlib.util.find_spec("liger_kernel") is not None:
        made["Liger"] = lambda: by_liger(case)
    made["nostall"] = lambda: by_backend(function, {})
    made["nostall, chunked"] = lambda: by_backend(function, {"nostall.loss": "chunked"})
    return made


def by_liger(case: Case) -> Loss:
    """Liger's fused product and cross-entropy; importing it is part of its first step."""
    ops: Any = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        operands = (hidden, weight, labels, None, None, -100, 0.0, case.label_smoothing)
        result = ops.LigerFusedLinearCrossEntropyFunction.apply(*operands)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        return loss

    return run


def by_backend(function: Loss, options: dict[str, Any]) -> Loss:
    """The function by the backend; its attribute ``reports`` has what was chosen and why."""
    backend = Backend()
    compiled: Any = torch.compile(function, backend=backend, options=options)

    def run(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        result: Tensor = compiled(hidden, weight, labels)
        return result

    run.reports = backend.reports  # type: ignore[attr-defined]
    return run


def wait_for_choice(function: Loss, step: Callable[[], object]) -> list[str]:
    """Take steps until the backend has chosen; its explanation as lines."""
    reports = getattr(function, "reports", None)
    if reports is None:
        return []
    end = time.monotonic() + MAX_CHOICE_SECONDS
    while time.monotonic() < end and not all(report.reason for report in reports):
        with gpu_turn():
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
    lines: list[str] = [line for report in reports for line in report.explain().splitlines()]
    return lines


def chunked(function: Loss, chunks: int) -> Loss:
    """The function by Inductor, with its loss in so many chunks.

    Raises ValueError if the loss is not recognised.
    """
    from torch._inductor.compile_fx import compile_fx

    def backend(module: Any, inputs: Any) -> Any:
        changes = chunk_losses(module, forced=True, chunks=chunks)
        if not changes.changed:
            raise ValueError(f"the loss stays: {changes.lines(changes.left)}")
        with backward_with_forward():
            return compile_fx(module, inputs)

    return torch.compile(function, backend=backend)


def reference(case: Case, operands: Operands) -> list[Tensor]:
    """Loss and gradients in fp64."""
    leaves = [x.detach().double().requires_grad_() for x in (operands.hidden, operands.weight)]

    def wide(hidden: Tensor, weight: Tensor) -> Tensor:
        logits = F.linear(hidden, weight)
        if case.loss == "mean":
            return F.cross_entropy(logits, operands.labels, label_smoothing=case.label_smoothing)
        known = torch.log_softmax(logits, -1).gather(-1, operands.labels[:, None])[:, 0]
        return -(known * (operands.labels % 7 + 1)).mean()

    loss = wide(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def errors(operands: Operands, loss: Tensor, expected: list[Tensor]) -> dict[str, float]:
    """Errors of loss and gradients, relative to the root mean square of each."""
    found = [loss, operands.hidden.grad, operands.weight.grad]
    names = ("loss", "hidden", "weight")
    return {
        name: float((value.double() - wanted).norm() / wanted.norm())
        for name, value, wanted in zip(names, found, expected, strict=True)
    }


def memory_of(step: Callable[[], object], operands: Operands) -> dict[str, int]:
    """Peak memory of a step above what is allocated, and the part above its gradients."""
    operands.hidden.grad = operands.weight.grad = None
    peak = peak_bytes(step)
    gradients = 2 * (operands.hidden.numel() + operands.weight.numel())
    return {"peak_bytes": peak, "above_gradients_bytes": peak - gradients}


@dataclass(frozen=True)
class _Timing:
    device: str
    measured_s: float


def measure(case: Case, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """All methods of one case."""
    on_gpu = options.device == "cuda"
    operands = Operands.of(case, options.device)
    expected = reference(case, operands)
    record: dict[str, Any] = {"case": vars(case), "logits_bytes": case.logits_bytes}
    record |= {"methods": {}, "failed": {}}
    steps: dict[str, Callable[[], object]] = {}
    wanted = [each for each in options.methods.split(";") if each]
    for name, make in methods(case, options.device).items():
        if wanted and name not in wanted:
            continue
        if time.monotonic() > end:
            record["failed"][name] = "the time was up"
            continue
        began = time.monotonic()
        try:
            torch._dynamo.reset()
            function = make()
            step = operands.step(function)
            loss = step()
            found: dict[str, Any] = {"first_step_s": round(time.monotonic() - began, 2)}
            if explanation := wait_for_choice(function, step):
                loss = step()
                found["choice_s"] = round(time.monotonic() - began, 2)
                found["explanation"] = explanation
            found["errors"] = errors(operands, loss, expected)
            if on_gpu:
                step()
                found |= memory_of(step, operands)
                share = found["above_gradients_bytes"] / case.logits_bytes
                found["share_of_logits"] = share
        except Exception as error:  # the other methods are measured
            record["failed"][name] = one_line(error)
            continue
        record["methods"][name] = found
        steps[name] = step
        print(f"  {name}: {found}", flush=True)
    expected.clear()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    timing = _Timing(options.device, options.seconds)
    with gpu_turn():
        record["loop"] = time_interleaved(steps, timing, BASE)
        if on_gpu:
            record["replayed"] = time_replays(steps, timing)
        with contextlib.suppress(Exception):  # optional
            record["kernels"] = {
                name: _shortened(profile_kernels(steps[name])) for name in PROFILED if name in steps
            }
    return record


def time_replays(steps: Mapping[str, Callable[[], object]], timing: _Timing) -> dict[str, Any]:
    """Times of steps as CUDA graphs; names the steps that fail."""
    graphs: dict[str, CapturedStep] = {}
    failed: dict[str, str] = {}
    for name, step in steps.items():
        try:
            graphs[name] = capture_step(step)
        except Exception as error:  # the other steps are timed
            failed[name] = one_line(error)
    if BASE not in graphs:
        return {"failed": failed}
    replays = {name: captured.replay for name, captured in graphs.items()}
    return {"failed": failed, **time_interleaved(replays, timing, BASE)}


def _shortened(profile: dict[str, Any]) -> dict[str, Any]:
    return {**profile, "by_name": profile.get("by_name", [])[:10]}


def main(options: argparse.Namespace) -> None:
    """Measure the selected cases; the file is written after each."""
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU, or use --small --device cpu")
    end = time.monotonic() + options.limit
    wanted = [each for each in options.cases.split(",") if each]
    result: dict[str, Any] = {"gpu": device_name(torch.device(options.device)), "cases": {}}
    for name, case in CASES.items():
        if wanted and name not in wanted:
            continue
        if time.monotonic() > end - options.limit / 10:
            print(f"{name}: the time was up", flush=True)
            continue
        small = Case(SMALL.tokens, SMALL.width, SMALL.classes, case.loss, case.label_smoothing)
        print(name, flush=True)
        record = measure(small if options.small else case, options, end)
        result["cases"][name] = record
        save(options.out, kind="measured", torch=torch.__version__, **result)
        for line in lines(record):
            print(f"  {line}", flush=True)
        gc.collect()


def lines(record: dict[str, Any]) -> list[str]:
    """One line for each method."""
    loop = record["loop"]
    text = []
    for name, samples in loop["samples_s"].items():
        found, compared = record["methods"][name], loop["compared"].get(name)
        line = f"{name:24} {1e3 * statistics.median(samples):8.3f} ms"
        if compared:
            line += f" {compared['ratio']:.3f} [{compared['low']:.3f}, {compared['high']:.3f}]"
            line += f" null [{compared['null_low']:.3f}, {compared['null_high']:.3f}]"
        if replayed := record.get("replayed", {}).get("compared", {}).get(name):
            line += f" graphs {replayed['ratio']:.3f}"
            line += f" [{replayed['low']:.3f}, {replayed['high']:.3f}]"
        if "share_of_logits" in found:
            line += f" {found['peak_bytes'] / 1e9:.3f} GB, above gradients"
            line += f" {found['share_of_logits']:.3f} of the logits"
        line += f" errors {', '.join(f'{k} {v:.1e}' for k, v in found['errors'].items())}"
        text.append(line)
    return text + [f"{name:24} FAILED {why[:150]}" for name, why in record["failed"].items()]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", default="", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--methods", default="", help="separated by semicolons; default: all")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds of one comparison")
    parser.add_argument("--limit", type=float, default=150, help="seconds for everything")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--small", action="store_true")
