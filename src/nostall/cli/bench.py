"""``nostall bench TARGET``: how long the unchanged kernel takes, and how sure that is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from nostall.cli.console import Format, FormatOption, out, show_json, show_table
from nostall.cli.inputs import ArchOption, read_cubin
from nostall.cli.inputs import source as read_source
from nostall.cli.measuring_options import (
    ChecksOption,
    ColdOption,
    SanitizerOption,
    TimingOption,
    ToleranceOption,
    clock,
    enough,
)
from nostall.cli.measuring_options import tolerance as read_tolerance
from nostall.core import BadInput, Comparison
from nostall.gpu import Kernel, LocalGpu, MeasurementPlan, Outcome, Timing
from nostall.gpu import sanitizer as compute_sanitizer
from nostall.tuning.gpu_objective import Decision, decide
from nostall.tuning.source import Source


def bench(
    target: Annotated[
        str, typer.Argument(help="A cubin, a fatbin, or path.py:kernel for a Triton kernel.")
    ],
    kernel: Annotated[
        str | None, typer.Option(help="Which kernel, when there are several.")
    ] = None,
    launch: Annotated[Path | None, typer.Option(help="Launch specification (TOML).")] = None,
    arch: ArchOption = None,
    candidate: Annotated[
        Path | None, typer.Option(help="A changed cubin to check and time beside the original.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved samples of each.")] = 200,
    checks: ChecksOption = 4,
    tolerance: ToleranceOption = None,
    timing: TimingOption = "graph",
    cold: ColdOption = False,
    sanitizer: SanitizerOption = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    format: FormatOption = Format.TABLE,
) -> None:
    """Measure a kernel on the GPU, beside itself (the null) and a candidate.

    Exit code 0: measured; 1: the candidate does not load, faults, hangs or computes something else;
    2: bad input, also a kernel whose outputs differ between two launches; 3: no GPU here.
    """
    if rounds < 2:
        raise BadInput(f"--rounds is {rounds}; give 2 or more, such as 200")
    if seed < 0:
        raise BadInput(f"--seed is {seed}; give 0 or a greater whole number")
    source = read_source(target, kernel, launch, arch)
    changed = read_cubin(candidate, arch) if candidate is not None else source.cubin
    if source.launch is None:
        raise BadInput(
            f"{source.origin}: measuring needs to know how {source.kernel!r} is launched; give "
            "--launch spec.toml (grid, block, shared, args)"
        )
    near = read_tolerance(tolerance)
    plan = MeasurementPlan(cold=cold, seed=seed, clock=clock(timing), tolerance=near)
    tried = Kernel(source.cubin, source.kernel, source.launch)
    enough(checks)
    if sanitizer:
        compute_sanitizer.find()
    with LocalGpu(tried, plan) as gpu:
        decision = decide(gpu, changed, rounds, checks, seed)
        about = dict(gpu.info)
    reports = compute_sanitizer.sanitize(tried, changed, plan) if sanitizer else {}
    said = _described(source, candidate, decision, plan, about) | {
        "checks": checks,
        "sanitizer": {tool: vars(report) for tool, report in reports.items()} or None,
    }
    if format is Format.JSON:
        show_json(said)
    elif decision.comparison is not None and decision.outcome.timing is not None:
        _show(source, candidate, decision.comparison, decision.outcome.timing, plan, about)
        if candidate is not None:
            out.print(f"outputs equal the original's {_how(plan)} on {checks} random inputs")
    else:
        out.print(f"{candidate or source.origin}: {_failure(decision.outcome)}")
    if format is not Format.JSON:
        for tool, report in reports.items():
            out.print(f"{tool}: {report.answer}{': ' if report.detail else ''}{report.detail}")
    if decision.comparison is None or any(r.answer == "errors" for r in reports.values()):
        raise typer.Exit(1)


def _described(
    source: Source,
    candidate: Path | None,
    decision: Decision,
    plan: MeasurementPlan,
    about: dict[str, str],
) -> dict[str, Any]:
    """The whole answer with all samples, in seconds per launch."""
    found: dict[str, Any] = {
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
        "gpu": about,
    }
    compared, timing = decision.comparison, decision.outcome.timing
    if compared is None or timing is None:
        return found
    samples = {"original": timing.original, "null": timing.null}
    found["null"] = [compared.null_low, compared.null_high]
    if candidate is not None:
        samples["candidate"] = timing.candidate
        found |= {
            "ratio": compared.ratio,
            "interval": [compared.low, compared.high],
            "verdict": compared.verdict,
        }
    found["medians"] = {name: float(np.median(values)) for name, values in samples.items()}
    return {**found, "samples": samples}


def _show(
    source: Source,
    candidate: Path | None,
    compared: Comparison,
    timing: Timing,
    plan: MeasurementPlan,
    about: dict[str, str],
) -> None:
    rows = [("original", timing.original), ("original again (null)", timing.null)]
    if candidate is not None:
        rows.insert(1, (str(candidate), timing.candidate))
    warm = "cold L2 cache" if plan.cold else "warm caches"
    warm += {"graph": "", "events": ", launch by launch", "cupti": ", by CUPTI"}[plan.clock]
    show_table(
        f"{source.kernel} on {about.get('gpu', 'an unknown GPU')}, measured, {warm}, us per launch",
        ("", "median", "2.5 %", "97.5 %", "samples", "TFLOPS"),
        [(name, *_row(values, source)) for name, values in rows],
    )
    out.print(
        f"null: the original against itself gives [{compared.null_low:.4f}, "
        f"{compared.null_high:.4f}]; what lies within cannot be told from noise here"
    )
    if candidate is not None:
        out.print(
            f"original / candidate: {compared.ratio:.4f} [{compared.low:.4f}, "
            f"{compared.high:.4f}]: {compared.verdict}"
        )


def _how(plan: MeasurementPlan) -> str:
    return f"within {plan.tolerance}" if plan.tolerance else "bit by bit"


def _row(values: tuple[float, ...], source: Source) -> tuple[str, ...]:
    low, median, high = np.percentile(np.asarray(values) * 1e6, (2.5, 50, 97.5))
    flops = source.launch.flops if source.launch is not None else None
    rate = f"{flops / median * 1e-6:.3g}" if flops is not None else "-"
    return (f"{median:.3f}", f"{low:.3f}", f"{high:.3f}", f"{len(values)}", rate)


def _failure(outcome: Outcome) -> str:
    """What became of a candidate that was not timed."""
    means = {
        "wrong": "does not compute what the original does",
        "rejected": "is not loadable",
        "fault": "faults",
        "hang": "does not end",
    }
    return f"{means.get(outcome.status, outcome.status)}: {outcome.detail}"
