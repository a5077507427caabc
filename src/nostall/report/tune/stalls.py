"""Modelled stall cycles of both schedules, by reason and by instruction."""

from __future__ import annotations

from dataclasses import dataclass

from nostall.core import NostallError
from nostall.report.tune.run_data import RunData
from nostall.sass.model import Explanation, SmModel
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
