"""Terminal output of ``nostall tune``: the gain, the checks, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nostall.cli.terminal.console import Format, err, out, show_json
from nostall.cli.tuning.assembler_output import assembler_lines, dependent_lines, median_times
from nostall.cli.tuning.runs import ORIGINAL_FILE, TuneRun, resume_command
from nostall.sass.model.agreement import model_caution
from nostall.store import Row
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import ASSEMBLER_KEY

if TYPE_CHECKING:
    from nostall.tuning.job import TuningResult


def show_result(
    tune_run: TuneRun,
    result: TuningResult,
    page: Path,
    row: Row | None,
    format: Format,
    resumed: Sequence[str] = (),
) -> None:
    """Print a result.

    ``page`` is its report, ``row`` its row in the store, if any.  ``resumed``: options that a
    command that continues the run repeats.
    """
    run, source = tune_run.run, tune_run.source
    if format is Format.JSON:
        assert run.record.result is not None
        record = {"record": row.id if row is not None else None}
        show_json({"run": str(run.path), "kernel": source.kernel, **record, **run.record.result})
        return
    settings, search = tune_run.settings, result.search
    out.print(
        f"{source.kernel} ({settings.strategy}, seed {settings.seed}): "
        f"{search.evaluations} evaluations, {search.rejected} illegal proposals, "
        f"{search.seconds:.1f} s, stopped: {search.stopped}{_limit(settings, result)}"
    )
    out.print(_gain(result))
    recorded = run.record.result or {}
    if result.improved and search.start_measurement.kind == "measured":
        out.print(f"medians:  {median_times(recorded)}")
    if compared := source.provenance.get("starts"):
        start = source.provenance.get(ASSEMBLER_KEY, "the compiler's own cubin")
        out.print(f"start:    {start} (compared: {compared})")
    for line in _checks(settings, result):
        out.print(line)
    assembler = recorded.get("assembler")
    if assembler is not None:
        for line in assembler_lines(assembler):
            out.print(line)
    dependent = recorded.get("dependent_launch")
    if dependent is not None:
        for line in dependent_lines(dependent):
            out.print(line)
    out.print(f"report:   {page}")
    if search.start_measurement.kind == "modelled":
        err.print(model_caution())
    out.print(f"next:     {_next_command(tune_run, result, resumed)}")
    if row is not None:
        option = "--modelled " if row.kind == "modelled" else ""
        out.print(
            f"use it:   nostall apply {option}-- python your_program.py  (record {row.id[:12]})"
        )


def _next_command(tune_run: TuneRun, result: TuningResult, resumed: Sequence[str]) -> str:
    """Verify the pair of cubins; without a gain, search on, because the pair is one file."""
    path, settings = tune_run.run.path, tune_run.settings
    if result.improved:
        is_assembled = bool((tune_run.run.record.result or {}).get("assembler"))
        files = [path] if is_assembled else [path / ORIGINAL_FILE, path / "best.cubin"]
        measured = settings.measured_latencies and not is_assembled
        options = ["--measured-latencies"] if measured else []
        return shlex.join(["nostall", "verify", *map(str, files), *options])
    if settings.evaluations is not None:
        more = f"--evaluations {settings.evaluations}"
    else:
        more = f"--seconds {settings.seconds:g}"
    more = shlex.join([*resumed, *more.split()])
    return f"{resume_command(path)} {more}  (searches on; or try another --seed or --strategy)"


def _limit(settings: Settings, result: TuningResult) -> str:
    """The limit that ended the search, such as `` (its limit of 60 s)``."""
    if result.search.stopped != "budget":
        return ""
    limit = settings.evaluations
    if limit is not None and result.search.evaluations >= limit:
        return f" (its limit of {limit} evaluations)"
    return f" (its limit of {settings.seconds:g} s)" if settings.seconds is not None else ""


def _gain(result: TuningResult) -> str:
    start = result.search.start_measurement
    if not result.improved:
        return (
            f"nothing better than the original was found ({start.kind}{_intervals(result)}); "
            "the original is kept"
        )
    moves = (
        ""
        if result.recipe is not None
        else f"{result.num_moved} positions changed, {result.num_retimed} control words changed"
    )
    if start.kind == "measured":
        return f"measured gain: {result.ratio:.4f}x{_intervals(result)}{moves and f'  ({moves})'}"
    return (
        f"modelled gain: {result.ratio:.4f}x  (SM model: {start.value * 1e6:.3f} us -> "
        f"{start.value / result.ratio * 1e6:.3f} us{moves and f'; {moves}'})"
    )


def _intervals(result: TuningResult) -> str:
    """The 95 % confidence intervals of a measured ratio and of the null; empty if modelled."""
    comparison = result.decision.comparison if result.decision is not None else None
    if comparison is None:
        return ""
    return (
        f" [{comparison.low:.4f}, {comparison.high:.4f}], null "
        f"[{comparison.null_low:.4f}, {comparison.null_high:.4f}]"
    )


def _checks(settings: Settings, result: TuningResult) -> Iterator[str]:
    """Results of the verifier, of the comparison of outputs, and of compute-sanitizer."""
    yield f"verifier: safe ({result.verdict.checked} instructions checked)"
    if result.decision is not None and result.decision.comparison is not None:
        how = f"within {settings.tolerance}" if settings.tolerance else "bit by bit"
        yield f"outputs:  equal to the original's {how} on {settings.checks} random inputs"
    for tool, report in result.sanitizer_reports.items():
        detail = f": {report.detail}" if report.detail else ""
        yield f"{tool + ':':<9} {report.answer}{detail}"
