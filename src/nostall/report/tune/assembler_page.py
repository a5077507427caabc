"""HTML page of a search of the assembler's input: winner, lineage, resources and candidates."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nostall.core import Run
from nostall.core.trial_log import TrialLog
from nostall.report import html
from nostall.report.tune.change_words import change_words, setting_words
from nostall.report.tune.sample_spread import ComparisonRecord, draw_samples, load_comparison
from nostall.report.tune.search_curve import count_drawn, draw_search_curve
from nostall.report.units import Scale
from nostall.tuning.strategies import ASSEMBLER

_RESOURCE_ROWS = (
    ("registers", "registers a thread"),
    ("spill_bytes", "bytes of spill stores and loads"),
    ("shared", "bytes of shared memory a block"),
    ("blocks_per_sm", "blocks an SM"),
    ("warps_per_sm", "warps an SM"),
    ("limit", "limit of the occupancy"),
)
"""Fields of the recorded resources, and their names on the page."""


@dataclass(frozen=True)
class AssemblerRun:
    """Contents of a run directory that the page shows."""

    path: Path
    run: Run
    log: TrialLog

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.run.record.settings

    @property
    def result(self) -> Mapping[str, Any]:
        """The result; empty if the run has not ended."""
        return self.run.record.result or {}


def is_assembler_run(path: Path) -> bool:
    """Whether a run directory is one of the assembler search."""
    return Run.open(path).record.settings.get("strategy") == ASSEMBLER


def render_assembler(path: Path) -> str:
    """The HTML text of the page of a run directory.

    Raises :class:`~nostall.core.errors.BadRun` if the directory is not a run.
    """
    run = Run.open(path)
    data = AssemblerRun(path, run, run.trial_log())
    result = data.result
    comparison, no_samples_reason = load_comparison(data.result)
    start = data.log.trials[0].value if data.log.trials else math.nan
    times = _times(result, comparison)
    scale = Scale(str(result.get("unit", "s")), times[0][1] if times else start)
    assembler = result.get("assembler") or {}
    return html.render(
        "assembler.html",
        styles=("page.css",),
        scripts=("copy.js",),
        filters={
            "change": change_words,
            "setting": setting_words,
            "thousands": lambda value: f"{value:,}" if isinstance(value, int) else value,
        },
        kernel=str(data.settings.get("kernel", "kernel")),
        status=run.record.status,
        kind=_kind(result),
        scale=scale,
        times=times,
        lead=_lead(result, _kind(result), bool(times)),
        result=result,
        notes=[*(result.get("notes") or []), *data.log.remarks],
        verdict=result.get("verdict"),
        next_command=_next_command(data),
        winner=assembler.get("winner"),
        ablation=assembler.get("ablation"),
        dependent=result.get("dependent_launch"),
        chain_rows=_chain_rows(result.get("dependent_launch")),
        resource_rows=_resource_rows(assembler),
        counts=sorted((assembler.get("counts") or {}).items(), key=lambda pair: -pair[1]),
        codes=assembler.get("codes") or {},
        assembler=assembler,
        search_curve=draw_search_curve(data.log.trials, scale, "measured"),
        drawn=count_drawn(data.log.trials),
        comparison=comparison,
        no_samples_reason=no_samples_reason,
        samples=draw_samples(comparison) if comparison else "",
        provenance=_provenance(data),
    )


def _times(
    result: Mapping[str, Any], comparison: ComparisonRecord | None
) -> list[tuple[str, float]]:
    """Names and seconds of the original and of the result; empty if nothing was measured."""
    names = ("original", "result")
    if comparison is not None:
        return list(zip(names, comparison.medians, strict=True))
    if "best" not in result:
        return []
    return list(zip(names, (result["original"], result["best"]), strict=True))


def _kind(result: Mapping[str, Any]) -> str:
    """Where the times come from; a replay names the GPU and the date of its measurements."""
    replayed = result.get("replayed")
    if isinstance(replayed, Mapping):
        return f"measured on {replayed['gpu']}, {replayed['date']}, replayed"
    return "not measured" if "shortlist" in result else "measured"


def _lead(result: Mapping[str, Any], kind: str, timed: bool) -> str:
    """The answer of the page in a sentence."""
    if not timed:
        return "No candidate was measured, so there is no result to use."
    if not result.get("improved"):
        return (
            "Nothing faster was found: no candidate was measured as faster than the original, so "
            "best.cubin is the original."
        )
    saved = f"The result takes {100 * (1 - 1 / result['ratio']):.1f} % less time ({kind})"
    verdict = result.get("verdict")
    if verdict is None:
        return f"{saved}; its machine code is not verified."
    safety = "its machine code is verified as safe" if verdict["safe"] else "it is unsafe"
    return f"{saved}; {safety}."


def _next_command(data: AssemblerRun) -> str:
    if data.run.record.status in ("running", "interrupted") and not data.result:
        return shlex.join(["nostall", "tune", "--resume", str(data.path)])
    if data.result.get("improved"):
        return shlex.join(["nostall", "verify", str(data.path)])
    return ""


def _chain_rows(dependent: Mapping[str, Any] | None) -> list[tuple[str, Mapping[str, Any]]]:
    """The timed comparisons of chains of launches, each with what it is over."""
    if dependent is None:
        return []
    rows = (
        ("the original, without dependent launches", dependent["chain"]),
        ("the search's result, without dependent launches", dependent["over_isolated"]),
    )
    return [(over, row) for over, row in rows if row is not None and "ratio" in row]


def _resource_rows(assembler: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Rows (name, before, after) of the table of resources."""
    before, after = assembler.get("original") or {}, assembler.get("winner") or {}
    return [
        (name, before.get(field, ""), after.get(field, ""))
        for field, name in _RESOURCE_ROWS
        if field in before or field in after
    ]


def _provenance(data: AssemblerRun) -> list[tuple[str, str]]:
    hidden = {"launch", "provenance"}
    record = data.run.record
    rows = [("command", record.command), ("created", record.created)]
    rows += [
        (k.replace("_", " "), str(v))
        for k, v in data.settings.items()
        if k not in hidden and v not in (None, "")
    ]
    source = data.settings.get("provenance")
    if isinstance(source, Mapping):
        rows += [(f"source: {k}", str(v)) for k, v in source.items()]
    assembler = data.result.get("assembler") or {}
    rows += [(k, " ".join(assembler[k])) for k in ("ptxas", "arguments") if k in assembler]
    model = data.result.get("model")
    if isinstance(model, Mapping):
        rows += [(f"device: {k}", str(v)) for k, v in model.items()]
    return rows
