"""Where the warps of both schedules wait, by instruction and reason, as the SM model sees it."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.core import NostallError
from nostall.report.tune.run_data import LoadedRun
from nostall.sass.model import Explanation, SmModel
from nostall.sass.schedule import Schedule

WORST = 12
"""Rows of the table of longest waits."""


@dataclass(frozen=True, slots=True)
class ReasonRow:
    """Warp cycles of one reason before and after; the shares are of the larger total."""

    number: int
    name: str
    before: float
    after: float
    share_before: float
    share_after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class WorstRow:
    """An instruction that waits long in one of the schedules; ``reason`` is its main one."""

    index: int
    text: str
    reason: str
    number: int
    before: float
    after: float


@dataclass(frozen=True)
class Waits:
    """The model's view of both schedules."""

    before: Explanation
    after: Explanation

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.before.reasons

    def rows(self) -> list[ReasonRow]:
        """Total warp cycles by reason."""
        totals = [e.cycles.sum(axis=0).tolist() for e in (self.before, self.after)]
        whole = max(1.0, *(sum(column) for column in totals))
        return [
            ReasonRow(number, name, old, new, 100 * old / whole, 100 * new / whole)
            for number, (name, old, new) in enumerate(zip(self.reasons, *totals, strict=True))
        ]

    def worst(self, texts: list[str]) -> list[WorstRow]:
        """The instructions that wait longest, in either schedule."""
        old, new = (e.cycles[:, 1:] for e in (self.before, self.after))
        longest = {i for e in (self.before, self.after) for i, _, _ in e.worst(WORST)}
        ranked = sorted(longest, key=lambda i: (-max(old[i].sum(), new[i].sum()), i))
        found: list[WorstRow] = []
        for index in ranked[:WORST]:
            waited = old[index] if old[index].sum() >= new[index].sum() else new[index]
            main = 1 + int(waited.argmax())
            before, after = float(old[index].sum()), float(new[index].sum())
            name = self.reasons[main]
            found.append(WorstRow(index, texts[index], name, main, before, after))
        return found

    def facts(self) -> list[tuple[str, str]]:
        """What the model assumed, for the reader to judge it."""
        e = self.before
        trips = ", ".join(
            f"loop {n}: {count}{' (assumed)' if n in e.assumed_trips else ''}"
            for n, count in e.trips.items()
        )
        return [
            ("warps simulated", str(e.simulated_warps)),
            ("loop iterations", trips or "no loops"),
            ("modelled cycles of a wave", f"{e.wave_cycles:,.0f} → {self.after.wave_cycles:,.0f}"),
        ]


def explain(run: LoadedRun) -> tuple[Waits | None, str]:
    """The model's view of a run, or None and why there is none."""
    if run.launch is None:
        return None, "the run records no launch, and without it the SM model cannot tell"
    trips = run.settings.get("assumed_trips", 8)
    try:
        model = SmModel(run.program, run.original, run.launch, assumed_trips=trips)
        before = model.explain(Schedule.from_function(run.original))
        return Waits(before, model.explain(Schedule.from_function(run.candidate))), ""
    except NostallError as error:
        return None, f"the SM model has no answer: {error}"
