"""The head of the page: the numbers, the verdict, what to do next, and where it all came from."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nostall.core import BadRun
from nostall.core.measurement import Kind
from nostall.report.tune.episodes import seeded
from nostall.report.tune.run_data import LoadedRun
from nostall.report.tune.side_by_side import BlockLineup
from nostall.report.units import Scale
from nostall.sass.model.agreement import model_caution

Tone = Literal["good", "bad", "plain"]


@dataclass(frozen=True)
class Summary:
    """What the reader should know first.

    ``kind`` stands next to every number: modelled or measured.  ``verdict_tone`` colours the
    verifier's answer; ``next_line`` is a command, ``next_why`` says what it is good for.
    """

    kernel: str
    architecture: str
    strategy: str
    status: str
    kind: Kind
    scale: Scale
    original: str
    best: str
    ratio: str
    gained: bool
    verdict: str
    verdict_tone: Tone
    findings: tuple[str, ...]
    next_line: str
    next_why: str
    counts: tuple[tuple[str, str], ...]
    provenance: tuple[tuple[str, str], ...]


def summarise(run: LoadedRun, blocks: list[BlockLineup]) -> Summary:
    """Collect the head of the page from whatever the run recorded."""
    numbers = _numbers(run)
    before, after, kind = numbers.original, numbers.best, numbers.kind
    scale = Scale(numbers.unit, before)
    ratio = numbers.ratio or (before / after if after > 0 else math.nan)
    verdict, tone, findings = _verdict(run)
    line, why = _next(run, kind, ratio)
    return Summary(
        kernel=run.original.name,
        architecture=f"sm_{run.program.sm}",
        strategy=str(run.settings.get("strategy", "unknown strategy")),
        status=run.record.status,
        kind=kind,
        scale=scale,
        original=scale(before) if math.isfinite(before) else "not recorded",
        best=scale(after) if math.isfinite(after) else "not recorded",
        ratio=f"{ratio:.4f}×" if math.isfinite(ratio) else "not recorded",
        gained=ratio > 1 and run.what != "refused",
        verdict=verdict,
        verdict_tone=tone,
        findings=findings,
        next_line=line,
        next_why=why,
        counts=tuple(_counts(run, blocks)),
        provenance=tuple(_provenance(run)),
    )


class _Numbers(BaseModel):
    """What the page needs of the result; NaN when unknown."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Kind
    unit: str
    original: float
    best: float
    ratio: float | None = None


def _numbers(run: LoadedRun) -> _Numbers:
    """From the result, and as long as there is none from the settings and the trials."""
    values = [t.value for t in run.trials if t.failure is None]
    so_far = {
        "kind": "measured" if run.settings.get("objective") == "gpu" else "modelled",
        "unit": "s",
        "original": values[0] if values else math.nan,
        "best": min(values, default=math.nan),
    }
    try:
        return _Numbers.model_validate({**so_far, **run.result})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRun(
            f"{run.path / 'run.json'}: result.{where}: {first['msg']}; run the tuning again"
        ) from error


def _verdict(run: LoadedRun) -> tuple[str, Tone, tuple[str, ...]]:
    recorded = run.result.get("verdict")
    if not isinstance(recorded, Mapping):
        return "the verifier has not judged this schedule yet", "plain", ()
    findings = tuple(str(f) for f in recorded.get("findings", ()))
    checked = recorded.get("checked")
    amount = f" ({checked:,} instructions, both halves)" if isinstance(checked, int) else ""
    if recorded.get("safe"):
        return f"verifier: safe{amount}", "good", findings
    return f"verifier: refused, {len(findings)} findings", "bad", findings


def _next(run: LoadedRun, kind: Kind, ratio: float) -> tuple[str, str]:
    path = run.path
    if run.what == "refused":
        files = [str(path / "original.cubin"), str(path / "refused.cubin")]
        line = shlex.join(["nostall", "verify", *files])
        return line, "The candidate was refused and is not used: please report it."
    if run.what == "best so far":
        return (
            shlex.join(["nostall", "tune", "--resume", str(path)]),
            "The search has not ended; this goes on with it.",
        )
    files = [str(path / "original.cubin"), str(path / "best.cubin")]
    line = shlex.join(["nostall", "verify", *files])
    if not ratio > 1:
        return line, "Nothing better than the original was found, so best.cubin is the original."
    if kind == "modelled":
        return line, model_caution()
    return line, "Checks once more, without the search, that the result is a safe re-scheduling."


def _counts(run: LoadedRun, blocks: list[BlockLineup]) -> list[tuple[str, str]]:
    result = run.result
    evaluations = result.get("evaluations", len(run.trials))
    rejected = result.get("rejected", run.trials[-1].rejected if run.trials else 0)
    seconds = result.get("seconds", run.trials[-1].seconds if run.trials else None)
    found = [
        ("instructions", f"{len(run.original.instructions):,}"),
        ("moved", f"{sum(len(b.moved) for b in blocks):,}"),
        ("positions changed", f"{sum(b.shifted for b in blocks):,}"),
        ("control words changed", f"{sum(len(b.retimed) for b in blocks):,}"),
        ("evaluations", f"{evaluations:,}"),
        ("illegal proposals", f"{rejected:,}"),
    ]
    if annealed := seeded(run.trials):
        found += [("by annealing", f"{annealed:,}"), ("by play", f"{evaluations - 1 - annealed:,}")]
    if isinstance(seconds, int | float):
        found.append(("search time", f"{seconds:,.1f} s"))
    return found


def _provenance(run: LoadedRun) -> list[tuple[str, str]]:
    rows = [
        ("command", run.record.command),
        ("created", run.record.created),
        ("status", run.record.status),
    ]
    rows += [(f"sha256 of {name}", digest) for name, digest in run.hashes.items()]
    hidden = {"launch", "provenance", "original_sha256"}
    rows += [(k, _text(v)) for k, v in run.settings.items() if k not in hidden and v is not None]
    made = run.settings.get("provenance")
    if isinstance(made, Mapping):
        rows += [(f"source: {k}", _text(v)) for k, v in made.items()]
    hidden = {"verified", "gain", "source", "kernel", "origin", "architecture"}
    hidden |= {"original_sha256", "best_sha256"}
    rows += [(k, _text(v)) for k, v in run.provenance.items() if k not in hidden]
    if isinstance(model := run.result.get("model"), Mapping):
        rows += [(f"model: {k}", _text(v)) for k, v in model.items()]
    if run.launch is not None:
        rows.append(("launch", _text(run.launch.model_dump(mode="json", exclude={"args"}))))
    return rows


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(v, str) for v in value):
        return "; ".join(value)
    return json.dumps(value)
