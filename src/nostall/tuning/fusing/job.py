"""Job of ``nostall fuse`` on a traced function: plan, generate, compile, verify, measure, tune.

Ctrl-C ends the current stage. The results so far are kept, and the document says that the job was
interrupted.

Measurement of generated kernels on this machine's GPU, each kernel on its own.

Whether a whole function gains can only be decided by measuring the whole function.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch

from nostall import __version__
from nostall.core import Observer, Run
from nostall.core.errors import MissingPart
from nostall.core.validation import dump_json
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.hardware import H200
from nostall.fusion.region_plans import captured_regions
from nostall.gpu import Kernel, LocalGpu
from nostall.sass.binary import toolchain
from nostall.tuning.fusing.binaries import CompiledKernel, compile_program, tune_kernel
from nostall.tuning.fusing.document import FILE, Document, Pass, TunedBinary
from nostall.tuning.fusing.region_plans import (
    RegionPlan,
    check_strategy,
    make_pass,
    plan_regions,
)
from nostall.tuning.fusing.target import FusionRequest, TracedTarget
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import Source

Measure = Callable[[Source], tuple[float | None, str]]
"""Function that measures a kernel: (seconds, GPU name), or (None, reason) if it fails."""


def time_kernel(kernel: CompiledKernel, measure: Measure) -> tuple[CompiledKernel, str]:
    """Measure a kernel; its record gets the measured time, or the reason of the failure.

    Returns the kernel and the text of ``measure``: the GPU's name, or the reason.
    """
    assert kernel.source is not None
    seconds, text = measure(kernel.source)
    update = {"not_measured": text} if seconds is None else {"measured": seconds}
    return replace(kernel, binary=kernel.binary.model_copy(update=update)), text


def check_gpu() -> None:
    """Raise :class:`MissingPart` if PyTorch sees no GPU."""
    if not torch.cuda.is_available():
        raise MissingPart(
            "--measure needs a GPU, and PyTorch sees none; `nostall doctor` checks this machine; "
            "without --measure, times are modelled"
        )


def measure_on_this_gpu(source: Source) -> tuple[float | None, str]:
    """Median time of a kernel on random inputs, measured in a separate process.

    The measurement compares the kernel with itself in paired launches.
    """
    assert source.launch is not None
    with LocalGpu(Kernel(source.cubin, source.kernel, source.launch)) as gpu:
        outcome = gpu.evaluate(source.cubin)
        device = gpu.info.get("gpu", "a GPU")
    if outcome.timing is None:
        return None, f"{outcome.status}: {outcome.detail}"
    return median(outcome.timing.original), device


Progress = Callable[[float, str], None]
"""Callback with the share of the job that is done (0 to 1) and a text for the current stage."""


@dataclass(frozen=True, kw_only=True)
class FusionSettings:
    """Settings of a fusion job."""

    strategy: str = "explore"
    """A key of :data:`~nostall.tuning.fusing.region_plans.STRATEGIES`."""
    arch: str = "sm_90"
    tuning: Settings | None = None
    """Settings of the search over the instructions of each kernel; None disables it."""
    measure: Measure | None = None
    """Function that measures kernels; None disables measurement."""
    observers: Sequence[Observer] = field(default=())
    """Observers of the search over instructions."""

    def __post_init__(self) -> None:
        check_strategy(self.strategy)

    def described(self, request: FusionRequest) -> dict[str, Any]:
        """The request and the settings as recorded in ``run.json``."""
        return {
            **asdict(request),
            "strategy": self.strategy,
            "arch": self.arch,
            "measure": self.measure is not None,
            "tune_sass": self.tuning is not None,
            "evaluations": self.tuning.evaluations if self.tuning else None,
            "seed": self.tuning.seed if self.tuning else None,
        }


def run_fuse(
    request: FusionRequest,
    traced: TracedTarget,
    settings: FusionSettings,
    run: Run,
    progress: Progress,
) -> Document:
    """Fuse a traced function and write all results to the run directory.

    Returns the document, which is also written as :data:`FILE`. Raises :class:`MissingPart` without
    Triton.
    """
    job = _FuseJob(traced, settings, run, progress)
    try:
        job.plan()
        job.compile()
        job.measure()
        job.tune()
    except KeyboardInterrupt:
        job.interrupted = True
    except Exception:  # any failure must be recorded in the run before it is raised
        run.finish("failed", {})
        raise
    document = job.document(request)
    run.write(FILE, (dump_json(document) + "\n").encode())
    run.finish("interrupted" if job.interrupted else "done", _summary(document))
    return document


class _FuseJob:
    """The stages of the job and their results so far."""

    def __init__(
        self, traced: TracedTarget, settings: FusionSettings, run: Run, progress: Progress
    ) -> None:
        self.traced, self.settings, self.run, self.progress = traced, settings, run, progress
        self.plans: dict[str, list[RegionPlan]] = {name: [] for name in traced.passes}
        """The planned regions of each pass."""
        self.kernels: dict[str, CompiledKernel] = {}
        self.tuned: list[TunedBinary] = []
        self.interrupted = False
        self.measured_on = ""
        # Share of the progress bar for one stage; tuning counts as two.
        self.share = 1 / (2 + (settings.measure is not None) + 2 * (settings.tuning is not None))

    def plan(self) -> None:
        """Partition each region and generate the source of its kernels."""
        passes = self.traced.passes
        total = sum(len(captured_regions(captured)) for captured in passes.values())
        num_completed = 0
        with tempfile.TemporaryDirectory(prefix="nostall-") as folder:
            for name, captured in passes.items():
                self.progress(0.0, f"planning {name}")
                for plan in plan_regions(captured, self.settings.strategy, Path(folder)):
                    self.plans[name].append(plan)
                    num_completed += 1
                    message = f"planning {name}: region {num_completed} of {total}"
                    self.progress(self.share * num_completed / total, message)

    @property
    def programs(self) -> list[Program]:
        """The distinct programs of all passes."""
        programs = (p for plans in self.plans.values() for plan in plans for p in plan.programs)
        return list({program.key: program for program in programs}.values())

    def compile(self) -> None:
        """Compile and verify each program."""
        programs = self.programs
        for at, program in enumerate(programs):
            message = f"compiling {at + 1} of {len(programs)}"
            self.progress(self.share * (1 + at / len(programs)), message)
            for kernel in compile_program(program, self.run, self.settings.arch):
                self.kernels[kernel.binary.name] = kernel

    def measure(self) -> None:
        """Measure each compiled kernel on the GPU, if the settings say so."""
        if self.settings.measure is None:
            return
        kernels = [kernel for kernel in self.kernels.values() if kernel.source is not None]
        for at, kernel in enumerate(kernels):
            message = f"measuring {at + 1} of {len(kernels)}"
            self.progress(self.share * (2 + at / len(kernels)), message)
            timed, text = time_kernel(kernel, self.settings.measure)
            self.kernels[kernel.binary.name] = timed
            self.measured_on = self.measured_on if timed.binary.measured is None else text

    def tune(self) -> None:
        """Search the instruction order of each kernel on the SM model, if the settings say so."""
        if self.settings.tuning is None:
            return
        for at, kernel in enumerate(self.kernels.values()):
            completed_share = 1 - 2 * self.share * (1 - at / len(self.kernels))
            self.progress(completed_share, f"tuning {at + 1} of {len(self.kernels)}")
            record, interrupted = tune_kernel(
                kernel,
                self.run,
                self.settings.tuning,
                self.run.record.command,
                self.settings.observers,
            )
            self.tuned.append(record)
            if interrupted:
                raise KeyboardInterrupt

    def document(self, request: FusionRequest) -> Document:
        """The results so far. Operators of regions without a plan count as run by PyTorch."""
        passes: list[Pass] = [
            make_pass(name, captured, self.plans[name])
            for name, captured in self.traced.passes.items()
        ]
        return Document(
            target=request.target,
            inputs=self.traced.inputs,
            strategy=self.settings.strategy,
            arch=self.settings.arch,
            hardware=H200.name,
            traced_on=self.traced.device,
            status="interrupted" if self.interrupted else "done",
            versions=_versions(),
            passes=tuple(passes),
            binaries=tuple(kernel.binary for kernel in self.kernels.values()),
            tuned=tuple(self.tuned),
            measured_on=self.measured_on,
        )


def _versions() -> dict[str, str]:
    packages = {name: metadata.version(name) for name in ("torch", "triton")}
    return {
        "nostall": __version__,
        "python": platform.python_version(),
        **packages,
        "nvdisasm": toolchain.version("nvdisasm"),
    }


def _summary(document: Document) -> dict[str, Any]:
    """The summary of a document for ``run.json``."""
    return {
        "kind": "modelled",
        "unit": "s",
        "passes": {
            traced_pass.name: {
                "operators": traced_pass.operators,
                "launches": traced_pass.launches,
                "unfused": traced_pass.seconds_unfused,
                "greedy": traced_pass.greedy_seconds,
                "fused": traced_pass.seconds,
            }
            for traced_pass in document.passes
        },
        "binaries": len(document.binaries),
        "failed": len(document.failed),
        "unknown": len(document.unknown),
        "improved": sum(tuned.improved for tuned in document.tuned),
    }
