"""JSON records of a tuning result: its verdict, comparison, statistics and provenance."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from nostall import __version__
from nostall.core import Tolerance
from nostall.core.measurement import Kind
from nostall.sass import Verdict
from nostall.sass.binary import toolchain
from nostall.sass.safety.measured_distances import MeasuredDistances
from nostall.tuning.gpu_objective import Decision
from nostall.tuning.sources.source import Source

if TYPE_CHECKING:
    from nostall.tuning.job import TuningResult
    from nostall.tuning.settings import Settings

MAX_FINDINGS = 20
"""Findings of the verifier in a record."""
MAX_FAILURES = 100
"""Failed candidates in a record."""


class CountedObjective(Protocol):
    """What a record says of a measured objective."""

    @property
    def outcome_counts(self) -> Mapping[str, int]: ...

    @property
    def phase_seconds(self) -> Mapping[str, float]: ...

    @property
    def failures(self) -> list[str]: ...


def comparison_settings(checks: int, tolerance: Tolerance | None) -> dict[str, Any]:
    """Settings of the comparison of outputs: number of random inputs, and the tolerance."""
    return {
        "checks": checks,
        "equal": f"within {tolerance}" if tolerance else "bit by bit",
        "tolerance": tolerance.model_dump() if tolerance else None,
    }


def comparison_record(decision: Decision) -> dict[str, Any]:
    """The final comparison with all its samples, or why nothing was timed."""
    comparison, timing = decision.comparison, decision.outcome.timing
    if comparison is None or timing is None:
        return {"fate": decision.outcome.status, "detail": decision.outcome.detail}
    return {
        "fate": decision.outcome.status,
        "verdict": comparison.verdict,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
        "null_low": comparison.null_low,
        "null_high": comparison.null_high,
        "loads": timing.loads,
        "samples": {
            "original": timing.original,
            "candidate": timing.candidate,
            "null": timing.null,
        },
    }


def final_times(
    samples: Mapping[str, Sequence[float]] | None, start: float, ratio: float
) -> dict[str, float]:
    """Times of the original and of the result: medians of the deciding comparison.

    Their quotient need not be the ratio, which is the median of the paired ratios. Without a
    comparison (``samples`` is None) the times are the search's: ``start``, and ``start / ratio``,
    which is exact because a model is deterministic. A kept original has its own time.
    """
    if samples is None:
        return {"original": start, "best": start / ratio}
    original, candidate = (median(samples[name]) for name in ("original", "candidate"))
    return {"original": original, "best": candidate if ratio != 1.0 else original}


def verdict_record(verdict: Verdict) -> dict[str, Any]:
    """The verdict of the verifier with its first findings."""
    return {
        "safe": verdict.safe,
        "checked": verdict.checked,
        "findings": [str(finding) for finding in verdict.findings[:MAX_FINDINGS]],
    }


def cubin_notes(
    sm: int, kind: Kind, measured_latencies: bool = False, *, is_assembled: bool = False
) -> tuple[str, ...]:
    """Limitations that the user of an optimised cubin should know.

    ``is_assembled``: ptxas made it, and no instruction was moved afterwards.
    """
    notes = []
    if not is_assembled:
        notes.append(".debug_line and .nv_debug_line_sass still describe the original order")
    if measured_latencies:
        measured = MeasuredDistances.load(sm)
        notes.append(
            f"verified with issue distances measured on {measured.gpu}, plus {measured.margin} "
            "cycles, where they are below those of compiler output"
        )
    if sm >= 100 and not is_assembled:
        notes.append(".nv.capmerc keeps the original code")
    if sm >= 100 and kind == "modelled":
        notes.append("not measured on this architecture")
    return tuple(notes)


def result_notes(sm: int, kind: Kind, settings: Settings, result: TuningResult) -> tuple[str, ...]:
    """:func:`cubin_notes` of a result."""
    is_assembled = result.recipe is not None and result.recipe.schedule is None
    return cubin_notes(sm, kind, settings.measured_latencies, is_assembled=is_assembled)


def result_record(
    result: TuningResult, settings: Settings, measured: CountedObjective | None
) -> dict[str, Any]:
    """The result as recorded in ``run.json``; times in the objective's unit."""
    search, decision = result.search, result.decision
    comparison = None if decision is None else comparison_record(decision)
    samples = None if comparison is None else comparison.get("samples")
    start = search.start_measurement.value
    record: dict[str, Any] = {
        "kind": search.best_measurement.kind,
        "unit": search.best_measurement.unit,
        **final_times(samples, start, result.ratio),
        "searched": {"original": start, "best": search.best_measurement.value},
        "ratio": result.ratio,
        "improved": result.improved,
        "moved": result.num_moved,
        "retimed": result.num_retimed,
        "evaluations": search.evaluations,
        "rejected": search.rejected,
        "seconds": search.seconds,
        "stopped": search.stopped,
        "verdict": verdict_record(result.verdict),
        "model": dict(search.start_measurement.provenance),
    }
    if measured is not None and comparison is not None:
        comparison_fields = comparison_settings(settings.checks, settings.tolerance)
        reports = {tool: vars(report) for tool, report in result.sanitizer_reports.items()}
        record |= {
            "comparison": comparison | comparison_fields,
            "fates": dict(measured.outcome_counts),
            "spent": {phase: round(s, 3) for phase, s in measured.phase_seconds.items()},
            "faults": measured.failures[:MAX_FAILURES],
            "sanitizer": reports or None,
        }
    return record


def provenance_record(
    source: Source, sm: int, settings: Settings, result: TuningResult
) -> Mapping[str, Any]:
    """Contents of ``provenance.json``: origin, toolchain and verification of the best cubin."""
    kind = result.search.best_measurement.kind
    comparison_fields = comparison_settings(settings.checks, settings.tolerance)
    return {
        "nostall": __version__,
        "python": platform.python_version(),
        "nvdisasm": toolchain.version("nvdisasm"),
        "kernel": source.kernel,
        "origin": source.origin,
        "architecture": f"sm_{sm}",
        "original_sha256": hashlib.sha256(source.cubin).hexdigest(),
        "best_sha256": hashlib.sha256(result.cubin).hexdigest(),
        "source": dict(source.provenance),
        "verified": verdict_record(result.verdict),
        "compared": comparison_fields if result.decision is not None else None,
        "gain": {"kind": kind, "ratio": result.ratio},
        "measured_latencies": settings.measured_latencies,
        "notes": result_notes(sm, kind, settings, result),
    }
