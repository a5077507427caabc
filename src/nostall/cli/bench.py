"""The command ``nostall bench``: measure a kernel, itself as the null, and a candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from nostall.cli.options.inputs import (
    ArchOption,
    KernelOption,
    LaunchOption,
    TargetArgument,
    load_source,
    read_cubin,
)
from nostall.cli.options.measuring_options import (
    ChecksOption,
    ColdOption,
    SanitizerOption,
    TimingOption,
    ToleranceOption,
    parse_timing,
    parse_tolerance,
    require_checks,
)
from nostall.cli.terminal.console import Format, FormatOption, out, show_json, show_table
from nostall.core import BadInput, Comparison
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan, Outcome, Timing
from nostall.gpu import sanitizer as compute_sanitizer
from nostall.gpu.sanitizer import SanitizerReport
from nostall.tuning.sources.source import Source, missing_launch

if TYPE_CHECKING:
    from nostall.tuning.gpu_objective import Decision

CandidateOption = Annotated[
    Path | None,
    typer.Option(help="A changed cubin to check and to time beside the original."),
]
RoundsOption = Annotated[int, typer.Option(help="Interleaved samples of each cubin.")]
SeedOption = Annotated[int, typer.Option(help="Random seed of the inputs.")]


@dataclass(frozen=True)
class _Measurement:
    """A measured kernel, the conditions of the measurement, and its results."""

    source: Source
    candidate: Path | None
    plan: MeasurementPlan
    checks: int
    decision: Decision
    device_info: Mapping[str, str]
    reports: Mapping[str, SanitizerReport]
    """Reports of compute-sanitizer by tool; empty if it did not run."""

    @property
    def failed(self) -> bool:
        """Whether the candidate was not timed, or compute-sanitizer found errors in it."""
        has_errors = any(report.answer == "errors" for report in self.reports.values())
        return self.decision.comparison is None or has_errors


def bench(
    target: TargetArgument,
    kernel: KernelOption = None,
    launch: LaunchOption = None,
    arch: ArchOption = None,
    candidate: CandidateOption = None,
    rounds: RoundsOption = 200,
    checks: ChecksOption = 4,
    tolerance: ToleranceOption = None,
    timing: TimingOption = "graph",
    cold: ColdOption = False,
    sanitizer: SanitizerOption = False,
    seed: SeedOption = 0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Measure a kernel, and a changed cubin beside it.

    The original is also compared with itself (the null), which shows the noise.

    Exit code 0: measured; 1: the candidate does not load, faults, hangs or computes something
    else; 2: bad input, or the outputs of the kernel differ between two launches; 3: no GPU.
    """
    if rounds < 2:
        raise BadInput(f"--rounds is {rounds}; give 2 or more, such as 200")
    if seed < 0:
        raise BadInput(f"--seed is {seed}; give 0 or a greater whole number")
    source = load_source(target, kernel, launch, arch)
    cubin = read_cubin(candidate, arch) if candidate is not None else source.cubin
    from nostall.tuning.gpu_objective import decide

    if source.launch is None:
        raise missing_launch(source, "measuring")
    plan = MeasurementPlan(
        cold=cold,
        seed=seed,
        tolerance=parse_tolerance(tolerance),
        clock=parse_timing(timing),
    )
    original = Kernel(source.cubin, source.kernel, source.launch)
    require_checks(checks)
    if sanitizer:
        compute_sanitizer.find()
    with LocalGpu(original, plan) as gpu:
        decision = decide(gpu, cubin, rounds, checks, seed)
        device_info = dict(gpu.info)
    reports = compute_sanitizer.sanitize(original, cubin, plan) if sanitizer else {}
    measurement = _Measurement(source, candidate, plan, checks, decision, device_info, reports)
    if format is Format.JSON:
        show_json(_document(measurement))
    else:
        _show(measurement)
    if measurement.failed:
        raise typer.Exit(1)


def _document(measurement: _Measurement) -> dict[str, Any]:
    """The JSON document with all samples, in seconds per launch."""
    source, candidate, plan = measurement.source, measurement.candidate, measurement.plan
    decision = measurement.decision
    document: dict[str, Any] = {
        "kernel": source.kernel,
        "origin": source.origin,
        "candidate": str(candidate) if candidate is not None else None,
        "kind": "measured",
        "unit": "s",
        "cold": plan.cold,
        "timing": plan.clock,
        "tolerance": plan.tolerance.model_dump() if plan.tolerance else None,
        "seed": plan.seed,
        "fate": decision.outcome.status,
        "detail": decision.outcome.detail,
        "gpu": measurement.device_info,
    }
    comparison, timing = decision.comparison, decision.outcome.timing
    if comparison is not None and timing is not None:
        document |= _comparison_fields(comparison, timing, has_candidate=candidate is not None)
    document["checks"] = measurement.checks
    document["sanitizer"] = {tool: vars(r) for tool, r in measurement.reports.items()} or None
    return document


def _comparison_fields(
    comparison: Comparison, timing: Timing, *, has_candidate: bool
) -> dict[str, Any]:
    samples = {"original": timing.original, "null": timing.null}
    fields: dict[str, Any] = {"null": [comparison.null_low, comparison.null_high]}
    if has_candidate:
        samples["candidate"] = timing.candidate
        fields |= {
            "ratio": comparison.ratio,
            "interval": [comparison.low, comparison.high],
            "verdict": comparison.verdict,
        }
    fields["medians"] = {name: float(np.median(values)) for name, values in samples.items()}
    return {**fields, "samples": samples}


def _show(measurement: _Measurement) -> None:
    """Print the times, or why the candidate was not timed, and the reports of compute-sanitizer."""
    decision, candidate = measurement.decision, measurement.candidate
    if decision.comparison is not None and decision.outcome.timing is not None:
        _show_times(measurement, decision.comparison, decision.outcome.timing)
        if candidate is not None:
            tolerance = measurement.plan.tolerance
            how = f"within {tolerance}" if tolerance else "bit by bit"
            out.print(f"outputs equal the original's {how} on {measurement.checks} random inputs")
    else:
        out.print(f"{candidate or measurement.source.origin}: {_failure(decision.outcome)}")
    for tool, report in measurement.reports.items():
        out.print(f"{tool}: {report.answer}{': ' if report.detail else ''}{report.detail}")


def _show_times(measurement: _Measurement, comparison: Comparison, timing: Timing) -> None:
    source, candidate, plan = measurement.source, measurement.candidate, measurement.plan
    rows = [("original", timing.original), ("original again (null)", timing.null)]
    if candidate is not None:
        rows.insert(1, (str(candidate), timing.candidate))
    conditions = "cold L2 cache" if plan.cold else "warm caches"
    conditions += {"graph": "", "events": ", launch by launch", "cupti": ", by CUPTI"}[plan.clock]
    gpu = measurement.device_info.get("gpu", "an unknown GPU")
    show_table(
        f"{source.kernel} on {gpu}, measured, {conditions}, us per launch",
        ("cubin", "median", "2.5 %", "97.5 %", "samples", "TFLOPS"),
        [(name, *_cells(values, source)) for name, values in rows],
    )
    out.print(
        f"null: original / original is in [{comparison.null_low:.4f}, {comparison.null_high:.4f}]; "
        "a ratio in this interval is within the noise"
    )
    if candidate is not None:
        out.print(
            f"original / candidate: {comparison.ratio:.4f} [{comparison.low:.4f}, "
            f"{comparison.high:.4f}]: {comparison.verdict}"
        )


def _cells(samples: tuple[float, ...], source: Source) -> tuple[str, ...]:
    """Median, percentiles (microseconds), number of samples, and TFLOPS if the flops are known."""
    low, median, high = np.percentile(np.asarray(samples) * 1e6, (2.5, 50, 97.5))
    flops = source.launch.flops if source.launch is not None else None
    rate = f"{flops / median * 1e-6:.3g}" if flops is not None else "-"
    return (f"{median:.3f}", f"{low:.3f}", f"{high:.3f}", f"{len(samples)}", rate)


def _failure(outcome: Outcome) -> str:
    """Why a candidate was not timed."""
    reasons = {
        "wrong": "its outputs differ from the original's",
        "rejected": "the driver does not load it",
        "fault": "it faults",
        "hang": "it hangs",
    }
    return f"{reasons.get(outcome.status, outcome.status)}: {outcome.detail}"
