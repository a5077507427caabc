"""Replay of a recorded search: make the winner again, verify it, and report its measured gain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from nostall.core import BadInput, Comparison, Observer, Run, Trial
from nostall.ptx.assemble.versions import Assembler
from nostall.tuning.assembler.recipes.recipe import hash_text
from nostall.tuning.assembler.recipes.recording import Recording, unpack
from nostall.tuning.assembler.recipes.reverify import RecipeVerdict, kernel_verdict, verify_recipe
from nostall.tuning.records.result_records import final_times, verdict_record
from nostall.tuning.settings import PTX_FILE, RECIPE_FILE
from nostall.tuning.sources.source import Source


@dataclass(frozen=True)
class Replay:
    """Result of a replay; the times were measured on the recording's GPU."""

    recording: Recording
    comparison: Comparison | None
    """The deciding comparison, computed anew from its samples; None if nothing was compared."""
    verdict: RecipeVerdict | None
    """The verdict of this machine on the winner; None without a winner."""
    notes: tuple[str, ...]
    """Differences between this machine and the one that measured."""

    @property
    def improved(self) -> bool:
        """Whether there is a winner that was measured as faster."""
        return self.comparison is not None and self.comparison.verdict == "faster"

    @property
    def ratio(self) -> float:
        """Time of the original / time of the result, measured."""
        return self.comparison.ratio if self.comparison is not None and self.improved else 1.0

    @property
    def measured_on(self) -> str:
        """The words that stand beside each time."""
        return f"measured on {self.recording.gpu}, {self.recording.date}, replayed"


def replay(
    source: Source,
    recording: Recording,
    run: Run,
    observers: Sequence[Observer] = (),
    installed: list[Assembler] | None = None,
) -> Replay:
    """Replay ``recording`` into a run directory.

    The files of the run are those of the recording, because another release of the compiler makes
    another PTX.  ``installed``: versions of ptxas (None: those that are found).  Raises
    :class:`BadInput` if this machine refuses the recorded winner.
    """
    notes = list(_notes(source, recording))
    _write_inputs(recording, run)
    for trial in _trials(recording):
        for observer in (*observers, run):
            observer.on_trial(trial)
    verdict, comparison = None, None
    if recording.comparison is not None:
        comparison = recording.comparison.compare(int(recording.settings.get("seed", 0)))
    if recording.recipe is not None and recording.winner is not None:
        cubin = unpack(recording.winner)
        verdict = verify_recipe(recording.recipe, recording.ptx_text, cubin, installed)
        if not verdict.safe:
            run.finish("failed", {"verdict": {"safe": False, "findings": [verdict.objection]}})
            raise BadInput(
                f"the recorded winner of {recording.kernel!r} is refused: {verdict.objection}; "
                "measure the kernel again with --objective gpu"
            )
        run.write("best.cubin", cubin)
        run.write(RECIPE_FILE, recording.recipe.to_bytes())
        if verdict.note:
            notes.append(verdict.note)
    else:
        run.write("best.cubin", unpack(recording.original))
        comparison = None
    result = Replay(recording, comparison, verdict, tuple(notes))
    run.finish("done", _result_record(result))
    return result


def _notes(source: Source, recording: Recording) -> list[str]:
    if source.ptx is None or hash_text(source.ptx) == hash_text(recording.ptx_text):
        return []
    here, there = (dict(p).get("compiler", "?") for p in (source.provenance, recording.provenance))
    return [
        f"{here} of this machine makes another PTX than {there} of the recording; the recorded PTX "
        "and the cubin made from it are used"
    ]


def _write_inputs(recording: Recording, run: Run) -> None:
    """Write the recorded inputs, and name them in ``run.json``."""
    original = unpack(recording.original)
    run.write("original.cubin", original)
    run.write(PTX_FILE, recording.ptx_text.encode())
    settings = {
        **run.record.settings,
        "kernel": recording.kernel,
        "original_sha256": None,
        "launch": recording.launch.model_dump(mode="json"),
        "provenance": dict(recording.provenance),
    }
    run.record = run.record.model_copy(update={"settings": settings})
    run.save()


def _trials(recording: Recording) -> list[Trial]:
    """The measurements of the recorded search, in order."""
    trials: list[Trial] = []
    best = recording.original_s
    values = [("start", recording.original_s, "")]
    for _, lever, result, ratios in recording.candidate_records():
        if ratios:
            values.append((lever, recording.original_s / median(ratios), ""))
        elif result in ("wrong", "fault", "hang", "rejected"):
            values.append((lever, float("inf"), result))
    for index, (lever, value, failure) in enumerate(values):
        accepted = value < best
        best = min(best, value)
        seconds = recording.seconds * index / len(values)
        trials.append(Trial(index, value, accepted, best, lever, 0, seconds, failure or None))
    return trials


def _result_record(result: Replay) -> dict[str, Any]:
    """The result as recorded in ``run.json``, with the fields of a measured run."""
    recording, comparison = result.recording, result.comparison
    recorded = recording.comparison
    samples = None if recorded is None else {
        "original": recorded.original, "candidate": recorded.candidate
    }  # fmt: skip
    record: dict[str, Any] = {
        "kind": "measured",
        "unit": "s",
        "replayed": {
            "gpu": recording.gpu,
            "driver": recording.driver,
            "date": recording.date,
            "rebuilt": result.verdict.is_rebuilt if result.verdict else None,
        },
        "notes": list(result.notes),
        **final_times(samples, recording.original_s, result.ratio),
        "searched": {"original": recording.original_s},
        "ratio": result.ratio,
        "improved": result.improved,
        "evaluations": recording.evaluations,
        "rejected": 0,
        "seconds": recording.seconds,
        "stopped": recording.stopped,
        "verdict": _verdict_record(result),
        "model": dict(recording.device),
        "assembler": recording.assembler,
    }
    if comparison is not None and recorded is not None:
        record["comparison"] = {
            "verdict": comparison.verdict,
            "ratio": comparison.ratio,
            "low": comparison.low,
            "high": comparison.high,
            "null_low": comparison.null_low,
            "null_high": comparison.null_high,
            "checks": recorded.checks,
            "equal": "bit by bit",
            "samples": json.loads(
                recorded.model_dump_json(include={"original", "candidate", "null"})
            ),
        }
    return record


def _verdict_record(result: Replay) -> dict[str, Any]:
    if result.verdict is not None:
        return {"safe": True, "checked": result.verdict.checked, "findings": []}
    recording = result.recording
    return verdict_record(kernel_verdict(unpack(recording.original), recording.kernel))
