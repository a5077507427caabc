"""HTML page of a tuning run: one file that contains its style sheet, script and data.

Modelled stall cycles of both schedules are shown by reason and by instruction.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nostall.core import NostallError
from nostall.core.files.atomic import write_text_atomically
from nostall.report import html
from nostall.report.tune.assembler_page import is_assembler_run, render_assembler
from nostall.report.tune.protections import (
    Dependence,
    DependenceAnalysis,
    analyze_dependences,
)
from nostall.report.tune.run_data import RunData, load_run
from nostall.report.tune.sample_spread import draw_samples, load_comparison
from nostall.report.tune.search_curve import (
    count_annealing_trials,
    count_drawn,
    draw_returns,
    draw_search_curve,
    find_improvements,
)
from nostall.report.tune.summary import BlockDiff, compare_blocks, make_summary
from nostall.sass.model import Explanation, SmModel
from nostall.sass.program import Function
from nostall.sass.schedule import Schedule

MAX_STALLS = 12
"""Rows of the table of the longest stalls."""


@dataclass(frozen=True, slots=True)
class ReasonRow:
    """Warp cycles of one reason in the original (before) and in the candidate (after)."""

    number: int
    """Column of the reason; selects its colour."""
    name: str
    before: float
    after: float
    percent_before: float
    """Per cent of the larger total of the two schedules."""
    percent_after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class StallRow:
    """Warp cycles that one instruction stalls in the original and in the candidate."""

    index: int
    text: str
    reason: str
    """The reason with most cycles."""
    number: int
    """Column of the reason."""
    before: float
    after: float


@dataclass(frozen=True)
class StallComparison:
    """The model's explanations of both schedules."""

    before: Explanation
    after: Explanation

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.before.reasons

    def reason_rows(self) -> list[ReasonRow]:
        """Total warp cycles by reason."""
        totals = [e.cycles.sum(axis=0).tolist() for e in (self.before, self.after)]
        largest = max(1.0, *(sum(column) for column in totals))
        return [
            ReasonRow(number, name, old, new, 100 * old / largest, 100 * new / largest)
            for number, (name, old, new) in enumerate(zip(self.reasons, *totals, strict=True))
        ]

    def longest_stalls(self, texts: list[str]) -> list[StallRow]:
        """The instructions that stall longest in either schedule; ``texts`` by original index."""
        old, new = (e.cycles[:, 1:] for e in (self.before, self.after))
        longest = {i for e in (self.before, self.after) for i, _, _ in e.worst(MAX_STALLS)}
        ranked = sorted(longest, key=lambda i: (-max(old[i].sum(), new[i].sum()), i))
        rows: list[StallRow] = []
        for index in ranked[:MAX_STALLS]:
            cycles = old[index] if old[index].sum() >= new[index].sum() else new[index]
            number = 1 + int(cycles.argmax())
            before, after = float(old[index].sum()), float(new[index].sum())
            rows.append(StallRow(index, texts[index], self.reasons[number], number, before, after))
        return rows

    def assumptions(self) -> list[tuple[str, str]]:
        """Names and values of the model's assumptions, and the modelled cycles of a wave."""
        before = self.before
        trips = ", ".join(
            f"loop {n}: {count}{' (assumed)' if n in before.assumed_trips else ''}"
            for n, count in before.trips.items()
        )
        cycles = f"{before.wave_cycles:,.0f} → {self.after.wave_cycles:,.0f}"
        return [
            ("warps simulated", str(before.simulated_warps)),
            ("loop iterations", trips or "no loops"),
            ("modelled cycles of a wave", cycles),
        ]


def compare_stalls(run: RunData) -> tuple[StallComparison | None, str]:
    """The modelled stalls of a run's schedules, or None and the reason."""
    if run.launch is None:
        return None, "the run records no launch, which the SM model needs"
    trips = run.settings.get("assumed_trips", 8)
    try:
        model = SmModel(run.program, run.original, run.launch, assumed_trips=trips)
        before = model.explain(Schedule.from_function(run.original))
        after = model.explain(Schedule.from_function(run.candidate))
        return StallComparison(before, after), ""
    except NostallError as error:
        return None, f"the SM model fails: {error}"


_REUSE_FLAG = re.compile(r"\.reuse\b")


def instruction_texts(function: Function) -> list[str]:
    """Text of each instruction by original index, without reuse flags, which may change."""
    by_index = sorted(function.instructions, key=lambda i: i.index)
    return [_REUSE_FLAG.sub("", i.text) for i in by_index]


def page_data(
    run: RunData, blocks: list[BlockDiff], stalls: StallComparison | None
) -> dict[str, Any]:
    """The data of the page.  ``sides`` are the original and the candidate.

    The candidate's dependences and waits are stored as a difference from the original's.
    """
    original, candidate, sm = run.original, run.candidate, run.program.sm
    by_index = sorted(original.instructions, key=lambda i: i.index)
    measured = bool(run.settings.get("measured_latencies"))
    before = _side(original, sm, measured, stalls.before if stalls else None)
    after = _side(candidate, sm, measured, stalls.after if stalls else None)
    for name in ("dependences", "waits"):
        after[name] = _difference(before[name], after[name])
    return {
        "text": instruction_texts(original),
        "pipe": [i.pipe for i in by_index],
        "fixed": [int(i.has_fixed_latency(sm)) for i in by_index],
        "pinned": [i.index for i in by_index if i.is_barrier or i.index in original.pinned],
        "reasons": list(stalls.reasons) if stalls else [],
        "names": ["original", run.candidate_name],
        "blocks": [_block(block, stalls) for block in blocks],
        "sides": [before, after],
    }


def _difference(before: list[Any], after: list[Any]) -> dict[str, Any]:
    """``after`` as ``removed`` positions of ``before`` and ``added`` items."""
    old, new = ({tuple(item) for item in items} for items in (before, after))
    return {
        "removed": [at for at, item in enumerate(before) if tuple(item) not in new],
        "added": [item for item in after if tuple(item) not in old],
    }


def _block(block: BlockDiff, stalls: StallComparison | None) -> dict[str, Any]:
    cycles = None
    if stalls:
        explanations = (stalls.before, stalls.after)
        cycles = [round(float(e.cycles[block.start : block.end].sum())) for e in explanations]
    return {
        "start": block.start,
        "end": block.end,
        "succ": block.successors,
        "loops": block.loops,
        "moved": block.moved,
        "shifted": block.num_shifted,
        "retimed": len(block.retimed),
        "cycles": cycles,
    }


def _side(
    function: Function, sm: int, measured: bool, explanation: Explanation | None
) -> dict[str, Any]:
    by_index = sorted(function.instructions, key=lambda i: i.index)
    analysis = analyze_dependences(function, sm, measured_latencies=measured)
    return {
        "order": [i.index for i in function.instructions],
        "control": [str(i.control) for i in by_index],
        "reuse": [0 if i.has_batch_field else i.control.reuse for i in by_index],
        "cycles": _cycles(explanation),
        "dependences": [_dependence(dependence) for dependence in analysis.dependences],
        "waits": _waits(analysis),
    }


def _cycles(explanation: Explanation | None) -> list[list[int] | int]:
    """Rounded warp cycles by reason; 0 for an instruction that never issues."""
    if explanation is None:
        return []
    rounded = explanation.cycles.round().astype(int)
    return [row.tolist() if row.any() else 0 for row in rounded]


def _dependence(dependence: Dependence) -> list[Any]:
    return [
        dependence.first,
        dependence.second,
        dependence.kind,
        dependence.registers,
        *dependence.protection,
    ]


def _waits(analysis: DependenceAnalysis) -> list[list[Any]]:
    return [[w.waiter, w.producer, w.role, w.scoreboards] for w in analysis.waits]


FILE = "ablation.json"
MAX_SHOWN_CHANGES = 20


class ChangeEffect(BaseModel):
    """Effect of one change on the time of the schedule."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    text: str
    """The change in words."""
    block: int
    """Number of the block."""
    index: int
    """Original index of the instruction."""
    loss_percent: float | None = Field(alias="lost")
    """Slowdown without this change, in per cent of the original's time; None if unknown."""


class Ablation(BaseModel):
    """Contents of the file; see :class:`nostall.tuning.ablation.Ablation`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1]
    kind: Literal["modelled", "measured"]
    num_changes: int = Field(alias="total")
    num_without_effect: int = Field(alias="idle")
    effects: tuple[ChangeEffect, ...] = Field(alias="rows")

    @property
    def shown(self) -> tuple[ChangeEffect, ...]:
        """The changes that save time, the greatest saving first."""
        saving = (e for e in self.effects if e.loss_percent is not None and e.loss_percent > 0)
        return tuple(saving)[:MAX_SHOWN_CHANGES]

    @property
    def num_inseparable(self) -> int:
        """Changes that cannot be undone alone."""
        return sum(effect.loss_percent is None for effect in self.effects)


def load_ablation(path: Path) -> Ablation | None:
    """The ablation of a run directory; None if it is missing or cannot be read."""
    try:
        return Ablation.model_validate_json((path / FILE).read_text())
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


REPORT_FILE = "report.html"
MAX_IMPROVEMENTS = 40
"""Rows of the table of improvements; the latest are shown."""


def write_report(path: Path) -> Path:
    """Write the report into a run directory of ``nostall tune``; returns the path of the page.

    Raises :class:`~nostall.core.errors.BadRun` if the directory lacks a part that the page needs.
    """
    page = render_assembler(path) if is_assembler_run(path) else render(load_run(path))
    target = path / REPORT_FILE
    write_text_atomically(target, page)
    return target


def render(run: RunData) -> str:
    """The HTML text of the page."""
    blocks = compare_blocks(run.original, run.candidate)
    stalls, no_stalls_reason = compare_stalls(run)
    comparison, no_samples_reason = load_comparison(run.result)
    ablation = load_ablation(run.path)
    notes = [*run.notes]
    if ablation is None and (run.path / FILE).exists():
        notes.append("ablation.json cannot be read")
    summary = make_summary(run, blocks, comparison)
    improvements = find_improvements(run.trials)
    num_annealing = count_annealing_trials(run.trials)
    return html.render(
        "page.html",
        styles=("page.css",),
        scripts=("copy.js", "panel.js", "listing.js"),
        filters={"cycles": lambda value: f"{value:,.0f}", "change": _change},
        summary=summary,
        candidate_name=run.candidate_name,
        notes=notes,
        search_curve=draw_search_curve(run.trials, summary.scale, summary.kind, num_annealing),
        drawn=count_drawn(run.trials),
        num_episodes=len(run.episodes),
        num_rollouts=len({e.rollout for e in run.episodes}),
        returns=draw_returns(run.episodes, summary.kind),
        num_failures=sum(t.failure is not None for t in run.trials),
        improvements=improvements[-MAX_IMPROVEMENTS:],
        num_improvements=len(improvements) - 1,
        ablation=ablation,
        comparison=comparison,
        no_samples_reason=no_samples_reason,
        samples=draw_samples(comparison) if comparison else "",
        stalls=stalls,
        no_stalls_reason=no_stalls_reason,
        longest_stalls=stalls.longest_stalls(instruction_texts(run.original)) if stalls else [],
        data=_embed(page_data(run, blocks, stalls)),
    )


def _change(value: float) -> str:
    """A signed whole number, with a typographic minus sign."""
    return f"{value:+,.0f}".replace("-", "\u2212") if abs(value) >= 0.5 else "0"


def _embed(data: dict[str, Any]) -> Markup:
    """JSON text that is safe inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))
