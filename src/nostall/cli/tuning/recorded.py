"""``nostall tune`` without a GPU: replay a recorded search, or build and verify candidates."""

from __future__ import annotations

import shlex
from pathlib import Path

from nostall.cli.terminal.console import Format, out, show_json
from nostall.cli.terminal.progress import Interruption, SearchProgress
from nostall.cli.tuning.assembler_output import assembler_lines, count_text, median_times
from nostall.cli.tuning.runs import TuneRun, discard_if_empty
from nostall.cli.verify import describe_verdict
from nostall.core import BadInput, trial_log
from nostall.ptx.assemble.pool import worker_count
from nostall.report.tune.page import write_report
from nostall.tuning.assembler.job import open_setup
from nostall.tuning.assembler.recipes.recording import Recording, find_recording
from nostall.tuning.assembler.recipes.replay import Replay, replay
from nostall.tuning.assembler.shortlist import (
    BUNDLE_FILE,
    Shortlist,
    build_shortlist,
    record_shortlist,
)
from nostall.tuning.sources.source import Source


def tune_recorded(
    tune_run: TuneRun, recording_file: Path | None, measure: str, format: Format, *, quiet: bool
) -> None:
    """Replay the recording of a kernel; without one, build and verify candidates.

    ``measure``: the command that measures the same search on a GPU.
    """
    run, source, settings = tune_run.run, tune_run.source, tune_run.settings
    with discard_if_empty(run, is_new=True, useless=(trial_log.FILE,)), run:
        recording, reason = _find(source, recording_file)
        if recording is not None:
            show_bar = format is Format.TABLE and not quiet
            with SearchProgress(settings.budget, enabled=show_bar) as bar:
                replayed = replay(source, recording, run, [bar])
            lines = _replay_lines(replayed, tune_run, measure)
        else:
            # No process measures here, so builds take all cores.
            with Interruption(), open_setup(source, workers=worker_count() + 1) as setup:
                found = build_shortlist(setup, settings.budget, settings.seed)
                record_shortlist(setup, found, run)
            lines = _shortlist_lines(found, tune_run, measure, reason)
    page = write_report(run.path)
    if format is Format.JSON:
        assert run.record.result is not None
        show_json({"run": str(run.path), "kernel": source.kernel, **run.record.result})
        return
    for line in [*lines, f"report:   {page}"]:
        out.print(line)


def _find(source: Source, recording_file: Path | None) -> tuple[Recording | None, str]:
    """The recording to replay, or why there is none.

    Raises :class:`BadInput` if the given file is not a recording of this kernel.
    """
    if recording_file is None:
        return find_recording(source)
    recording = Recording.read(recording_file)
    if not recording.fits(source):
        raise BadInput(
            f"{recording_file} is a recording of {recording.origin} for {recording.arch} with "
            f"another file, PTX, launch or architecture than {source.origin}; record this kernel "
            "with --objective gpu --record FILE"
        )
    return recording, ""


def _replay_lines(result: Replay, tune_run: TuneRun, measure: str) -> list[str]:
    recording, comparison = result.recording, result.comparison
    settings = recording.settings
    lines = [
        f"{recording.kernel} ({settings.get('strategy')}, seed {settings.get('seed')}): "
        f"{recording.evaluations} measurements in {recording.seconds:.1f} s on {recording.gpu}, "
        f"driver {recording.driver}, {recording.date}"
    ]
    if comparison is None or not result.improved:
        lines.append(
            f"nothing better than the original was found ({result.measured_on}); the original is "
            "kept"
        )
    else:
        record = tune_run.run.record.result or {}
        lines.append(
            f"gain {result.measured_on}: {result.ratio:.4f}x "
            f"({100 * (1 - 1 / result.ratio):.1f} % less time)"
        )
        lines.append(
            f"interval: {comparison.low:.4f} to {comparison.high:.4f}; the original beside itself: "
            f"{comparison.null_low:.4f} to {comparison.null_high:.4f}"
        )
        lines.append(f"medians:  {median_times(record)}")
    if result.verdict is not None:
        checked = describe_verdict(result.verdict, result.notes)
        lines.append(f"verifier: safe, on this machine ({checked})")
    if recording.comparison is not None and result.improved:
        checks = recording.comparison.checks
        lines.append(f"outputs:  were equal bit by bit on {checks} random inputs on that GPU")
    lines += assembler_lines(recording.assembler)
    lines += [f"note:     {note}" for note in result.notes]
    if result.improved:
        lines.append(f"next:     nostall verify {shlex.quote(str(tune_run.run.path))}")
    lines.append(f"measure:  {measure}  (on your GPU)")
    return lines


def _shortlist_lines(found: Shortlist, tune_run: TuneRun, measure: str, reason: str) -> list[str]:
    lines = [
        f"{tune_run.source.kernel}: no recording ({reason}), and no GPU was asked for",
        f"built:    {count_text(found.counts)}; stopped: {found.stopped}",
    ]
    if found.registers:
        least, most = min(found.registers), max(found.registers)
        number = f"{least}" if least == most else f"{least} to {most}"
        lines.append(f"verified: candidates use {number} registers a thread")
    lines.append(
        "unknown:  nothing was measured: whether a candidate is faster, and whether its outputs "
        "are equal bit by bit, is not known; the original is kept"
    )
    bundle = tune_run.run.path / BUNDLE_FILE
    if bundle.exists():
        lines.append(f"measure:  copy {bundle} to a machine with a GPU; unzip it; sh measure.sh")
    lines.append(f"or here:  {measure}  (needs a GPU)")
    return lines
