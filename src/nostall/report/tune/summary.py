"""Summary at the top of the page: gain, verdict, next command, counts and provenance."""

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
from nostall.core.text.plurals import pluralize
from nostall.core.validation import first_problem
from nostall.report.tune.run_data import BEST_SO_FAR, REJECTED, RunData
from nostall.report.tune.sample_spread import ComparisonRecord
from nostall.report.tune.search_curve import count_annealing_trials
from nostall.report.units import Scale
from nostall.sass.model.agreement import RANKING_WORTH, model_caution
from nostall.sass.model.trace import natural_loops
from nostall.sass.program import Function
from nostall.sass.schedule.changes import out_of_order
from nostall.tuning.settings import UNSAFE_CUBIN_FILE


@dataclass(frozen=True, slots=True)
class BlockDiff:
    """Differences in one basic block.  Instructions are named by original index."""

    number: int
    start: int
    """Position of the first instruction in the function."""
    end: int
    """Position after the last instruction."""
    successors: tuple[int, ...]
    """Numbers of the blocks that may follow."""
    loops: tuple[int, ...]
    """Numbers of the loops that contain the block."""
    moved: tuple[int, ...]
    """The fewest instructions whose move explains the new order."""
    num_shifted: int
    """Positions that hold another instruction than in the original."""
    retimed: tuple[int, ...]
    """Instructions with another control word."""

    @property
    def changed(self) -> bool:
        """Whether anything in the block differs."""
        return bool(self.num_shifted or self.retimed)


def compare_blocks(original: Function, candidate: Function) -> list[BlockDiff]:
    """The differences of two schedules of one function; instructions stay in their block."""
    loops = natural_loops(original.blocks)
    controls = {i.index: i.control for i in original.instructions}
    diffs: list[BlockDiff] = []
    for number, block in enumerate(original.blocks):
        old_order = [i.index for i in original.instructions[block.start : block.end]]
        instructions = candidate.instructions[block.start : block.end]
        position = {index: at for at, index in enumerate(old_order)}
        order = [i.index for i in instructions]
        diffs.append(
            BlockDiff(
                number=number,
                start=block.start,
                end=block.end,
                successors=block.succ,
                loops=tuple(loop.number for loop in loops if number in loop.body),
                moved=tuple(out_of_order(order, [position[i] for i in order])),
                num_shifted=sum(a != b for a, b in zip(old_order, order, strict=True)),
                retimed=tuple(i.index for i in instructions if i.control != controls[i.index]),
            )
        )
    return diffs


Tone = Literal["good", "bad", "plain"]
"""Colour of the verdict."""
NOT_RECORDED = "not recorded"
_LIMITS = ("evaluations", "seconds")
_OF_THE_MODEL = ("--objective", "--recording", "--out", "--evaluations", "--seconds")
"""Options of a search on a model that one with measured times does not repeat."""


@dataclass(frozen=True)
class Summary:
    """Texts at the top of the page."""

    kernel: str
    architecture: str
    strategy: str
    lead: str
    """The answer of the page in a sentence."""
    status: str
    """Status of the run: running, done, interrupted or failed."""
    kind: Kind
    """Whether the times are modelled or measured; shown next to each number."""
    scale: Scale
    original: str
    """Time of the original."""
    best: str
    """Time of the candidate."""
    ratio: str
    interval: str
    """Intervals of a measured gain and of the null; empty if modelled."""
    gained: bool
    """Whether the gain was measured, beyond its interval and beyond the null."""
    verdict: str
    verdict_tone: Tone
    findings: tuple[str, ...]
    """Findings of the verifier."""
    next_command: str
    next_reason: str
    """Purpose of the next command."""
    counts: tuple[tuple[str, str], ...]
    provenance: tuple[tuple[str, str], ...]


def make_summary(
    run: RunData, blocks: list[BlockDiff], comparison: ComparisonRecord | None
) -> Summary:
    """Make the summary from the parts that the run recorded.

    Measured times are the medians of the final comparison, if there is one.
    """
    numbers = _numbers(run)
    original, best, kind = numbers.original, numbers.best, numbers.kind
    if comparison is not None:
        original, best = comparison.medians
    scale = Scale(numbers.unit, original)
    ratio = numbers.ratio or (original / best if best > 0 else math.nan)
    gained = _is_measured_gain(kind, comparison) and run.candidate_name != REJECTED
    verdict, tone, findings = _verdict(run)
    command, reason = _next(run, kind, ratio)
    return Summary(
        kernel=run.original.name,
        architecture=f"sm_{run.program.sm}",
        strategy=_strategy(run),
        lead=_lead(run, kind, ratio, comparison),
        status=run.record.status,
        kind=kind,
        scale=scale,
        original=scale(original) if math.isfinite(original) else NOT_RECORDED,
        best=scale(best) if math.isfinite(best) else NOT_RECORDED,
        ratio=_ratio_text(ratio),
        interval=comparison.interval if comparison is not None else "",
        gained=gained,
        verdict=verdict,
        # The safety of a result that nobody should use yet is not the good news of the page.
        verdict_tone="plain" if tone == "good" and not gained else tone,
        findings=findings,
        next_command=command,
        next_reason=reason,
        counts=tuple(_counts(run, blocks)),
        provenance=tuple(_provenance(run)),
    )


def _strategy(run: RunData) -> str:
    """The strategy by what ran: a learning strategy anneals before its episodes."""
    name = str(run.settings.get("strategy", "unknown strategy"))
    annealed = count_annealing_trials(run.trials)
    if not annealed:
        return name
    episodes = pluralize(len(run.episodes), "episode")
    return f"{name}: {pluralize(annealed, 'annealing step')}, {episodes}"


def _is_measured_gain(kind: Kind, comparison: ComparisonRecord | None) -> bool:
    return kind != "modelled" and comparison is not None and comparison.verdict == "faster"


class _Numbers(BaseModel):
    """Fields of the result; NaN if unknown."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    kind: Kind
    unit: str
    original: float
    best: float
    ratio: float | None = None


def _numbers(run: RunData) -> _Numbers:
    """The numbers of the result; before there is one, those of the settings and the trials."""
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
        raise BadRun(
            f"{run.path / 'run.json'}: result.{first_problem(error, '')}; run the tuning again"
        ) from error


def _verdict(run: RunData) -> tuple[str, Tone, tuple[str, ...]]:
    """Text, colour and findings of the verifier's verdict."""
    record = run.result.get("verdict")
    if not isinstance(record, Mapping):
        return "verifier: this schedule is not verified yet", "plain", ()
    findings = tuple(str(finding) for finding in record.get("findings", ()))
    checked = record.get("checked")
    amount = f" ({checked:,} instructions checked)" if isinstance(checked, int) else ""
    if record.get("safe"):
        return f"verifier: safe{amount}", "good", findings
    return f"verifier: unsafe, {pluralize(len(findings), 'finding')}", "bad", findings


def _ratio_text(ratio: float) -> str:
    """A gain with four decimals; none is said in words."""
    if not math.isfinite(ratio):
        return NOT_RECORDED
    return "none" if ratio == 1 else f"{ratio:.4f}×"


def _lead(run: RunData, kind: Kind, ratio: float, comparison: ComparisonRecord | None) -> str:
    """The answer of the page in a sentence."""
    if run.candidate_name == REJECTED:
        return "The verifier rejects the candidate, so it is not used."
    if run.candidate_name == BEST_SO_FAR:
        return "The search has not ended; the page shows the best candidate so far."
    if not ratio > 1:
        return f"Nothing better than the original was found in {_effort(run)}."
    saved = f"{100 * (1 - 1 / ratio):.2g} % less time"
    if count_annealing_trials(run.trials) and not run.episodes:
        saved += f" by annealing, as no episode of {run.settings.get('strategy')} ran"
    if kind == "modelled":
        return f"{saved}, but only in the model, which {RANKING_WORTH}."
    if not _is_measured_gain(kind, comparison):
        return f"{saved} while searching, which no final comparison confirms."
    return f"{saved}, {kind}; the result replaces the original."


def _effort(run: RunData) -> str:
    """How much was searched, and the limit that ended it."""
    evaluations = int(run.result.get("evaluations", len(run.trials)))
    text = pluralize(evaluations, "evaluation")
    if evaluations == 1:
        text += ", that of the original itself"
    if run.result.get("stopped") != "budget":
        return text
    limits = [f"--{n} {run.settings[n]:g}" for n in _LIMITS if run.settings.get(n) is not None]
    return f"{text} (its limit: {' '.join(limits)})" if limits else text


def _next(run: RunData, kind: Kind, ratio: float) -> tuple[str, str]:
    """The command to run next, and what it is for."""
    path = run.path
    if run.candidate_name == REJECTED:
        return _verify_command(run, UNSAFE_CUBIN_FILE), (
            "The verifier rejects the candidate, so it is not used. Please report this bug."
        )
    if run.candidate_name == BEST_SO_FAR:
        command = shlex.join(["nostall", "tune", "--resume", str(path)])
        return command, "The search has not ended. This command resumes it."
    if kind == "modelled" and (command := measured_search(run.record.command)):
        return command, f"Searches with measured times, on a GPU. {model_caution()}"
    if not ratio > 1:
        more = [f"--{n}={run.settings[n]:g}" for n in _LIMITS if run.settings.get(n) is not None]
        command = shlex.join(["nostall", "tune", "--resume", str(path), *more])
        return command, "Searches on, as long again; or try another --seed or --strategy."
    reason = "Verifies again, without the search, that the result is a safe re-scheduling."
    return _verify_command(run, "best.cubin"), reason


def measured_search(command: str) -> str:
    """The command of a search on a model as one that measures, without its limits.

    Empty if it is not the command line of a search from its beginning.
    """
    words = shlex.split(command)
    if words[:2] != ["nostall", "tune"] or "--resume" in words:
        return ""
    kept, skipped = [], False
    for word in words:
        is_value, skipped = skipped, word in _OF_THE_MODEL
        if not (is_value or skipped or word.split("=")[0] in _OF_THE_MODEL):
            kept.append(word)
    return shlex.join([*kept, "--objective", "gpu"])


def _verify_command(run: RunData, candidate: str) -> str:
    files = [str(run.path / "original.cubin"), str(run.path / candidate)]
    options = ["--measured-latencies"] if run.settings.get("measured_latencies") else []
    return shlex.join(["nostall", "verify", *files, *options])


def _counts(run: RunData, blocks: list[BlockDiff]) -> list[tuple[str, str]]:
    result = run.result
    evaluations = result.get("evaluations", len(run.trials))
    rejected = result.get("rejected", run.trials[-1].rejected if run.trials else 0)
    seconds = result.get("seconds", run.trials[-1].seconds if run.trials else None)
    counts = [
        ("instructions", f"{len(run.original.instructions):,}"),
        ("moved", f"{sum(len(b.moved) for b in blocks):,}"),
        ("positions changed", f"{sum(b.num_shifted for b in blocks):,}"),
        ("control words changed", f"{sum(len(b.retimed) for b in blocks):,}"),
        ("evaluations", f"{evaluations:,}"),
        ("illegal proposals", f"{rejected:,}"),
    ]
    if annealed := count_annealing_trials(run.trials):
        in_episodes = evaluations - 1 - annealed
        counts += [("by annealing", f"{annealed:,}"), ("in episodes", f"{in_episodes:,}")]
    if isinstance(seconds, int | float):
        counts.append(("search time", f"{seconds:,.1f} s"))
    return counts


def _provenance(run: RunData) -> list[tuple[str, str]]:
    """Rows of the provenance table: command, hashes, settings, toolchain, model and launch."""
    rows = [
        ("command", run.record.command),
        ("created", run.record.created),
        ("status", run.record.status),
    ]
    if run.candidate_name not in (REJECTED, BEST_SO_FAR):
        rows.append(("verify again", _verify_command(run, "best.cubin")))
    rows += [(f"sha256 of {name}", digest) for name, digest in run.hashes.items()]
    hidden = {"launch", "provenance", "original_sha256"}
    rows += [(k, _text(v)) for k, v in run.settings.items() if k not in hidden and v is not None]
    source = run.settings.get("provenance")
    if isinstance(source, Mapping):
        rows += [(f"source: {k}", _text(v)) for k, v in source.items()]
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
