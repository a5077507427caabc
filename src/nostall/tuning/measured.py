"""Schedules judged by a GPU: the measured objective, and the decision at the end.

During the search each candidate is timed in pairs with the original, so that drifting clocks
cancel.  The best of thousands of noisy values is mostly luck: the finalists are therefore timed
again, longer and longer, and only a fresh process decides whether the last one replaces the
original.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from nostall.core import BadInput, Comparison, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.gpu import Device, Outcome
from nostall.sass.schedule import Patcher, Schedule, ScheduleSpace

KEPT = 12
"""Candidates that stay finalists."""

_REPEATS = (4, 12)
"""How often finalists are measured anew in the rounds of the race."""


class MeasuredSchedules(Objective[Schedule]):
    """Seconds per launch, as a device says.

    A value is the original's time at the start, divided by the median ratio of the candidate's
    interleaved pairs.  ``fates`` counts what became of the candidates, ``spent`` sums seconds by
    part, ``faults`` lists what went wrong.
    """

    kind: ClassVar[Kind] = "measured"
    unit: ClassVar[str] = "s"

    def __init__(self, space: ScheduleSpace, device: Device, flops: float | None = None) -> None:
        self.space, self.device, self.flops = space, device, flops
        self._patcher = Patcher(space.program, space.function)
        self.anchor: float | None = None
        self.fates: Counter[str] = Counter()
        self.spent: Counter[str] = Counter()
        self.faults: list[str] = []
        self._best: list[tuple[float, bytes, Schedule]] = []

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        return [self._evaluate(state) for state in states]

    def finalists(self) -> list[Schedule]:
        """The states with the best values so far, best first."""
        return [state for *_, state in sorted(self._best, reverse=True)]

    def saved(self) -> dict[str, Any]:
        """What a checkpoint of the search lacks: the anchor and the finalists, as JSON."""
        kept = [[-value, self.space.dump(state)] for value, _, state in sorted(self._best)]
        return {"anchor": self.anchor, "finalists": kept}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take back what :meth:`saved` gave, beside what is known already."""
        self.anchor = saved["anchor"]
        for value, state in saved["finalists"]:
            self._remember(self.space.load(state), value)

    def _evaluate(self, state: Schedule) -> Measurement:
        outcome = self.device.evaluate(self._patcher.patch(state))
        self.fates[outcome.fate] += 1
        self.spent.update(outcome.spent)
        if outcome.timing is None:
            self.faults.append(f"{outcome.fate}: {outcome.detail}")
            return Measurement("s", (), "measured", failure=f"{outcome.fate}: {outcome.detail}")
        original = np.asarray(outcome.timing.original)
        ratios = np.asarray(outcome.timing.candidate) / original
        if self.anchor is None:
            self.anchor = float(np.median(original))
        samples = tuple(float(x) for x in self.anchor * ratios)
        measurement = Measurement("s", samples, "measured", dict(self.device.about))
        self._remember(state, measurement.value)
        return measurement

    def _remember(self, state: Schedule, value: float) -> None:
        # Ties go by the state, so that a resumed search has the same finalists.
        entry = (-value, state.key(), state)
        if any(kept[1] == entry[1] for kept in self._best):
            return
        heapq.heappush(self._best, entry)
        if len(self._best) > KEPT:
            heapq.heappop(self._best)


def race(objective: MeasuredSchedules, states: Sequence[Schedule]) -> list[Schedule]:
    """Measure the finalists again and again, dropping the slower half each time; best first.

    Old values do not count: they are why these states were chosen.
    """
    left = list(states)
    for repeats in _REPEATS:
        fresh: list[tuple[float, int]] = []
        for number, state in enumerate(left):
            found = [m for _ in range(repeats) for m in objective.evaluate([state])]
            whole = all(m.failure is None for m in found)
            value = float(np.median([s for m in found for s in m.samples])) if whole else np.inf
            fresh.append((value, number))
        ranked = [left[number] for value, number in sorted(fresh) if np.isfinite(value)]
        left = ranked[: max(1, len(ranked) // 2)]
    return left


@dataclass(frozen=True)
class Decision:
    """The last word: fresh process, fresh inputs, interleaved with the original and a null."""

    outcome: Outcome
    comparison: Comparison | None

    @property
    def faster(self) -> bool:
        return self.comparison is not None and self.comparison.verdict == "faster"


def decide(device: Device, cubin: bytes, rounds: int, checks: int, seed: int = 0) -> Decision:
    """Compare ``cubin`` with the original; a candidate that fails is not faster."""
    if rounds < 2 or checks < 1:
        raise BadInput(f"rounds is {rounds} and checks is {checks}; at least 2 and 1 are needed")
    outcome = device.compare(cubin, rounds, checks)
    if outcome.timing is None:
        return Decision(outcome, None)
    timing = outcome.timing
    comparison = Comparison.of(
        timing.original,
        timing.candidate,
        timing.null,
        kind="measured",
        seed=seed,
        loads=timing.loads,
    )
    return Decision(outcome, comparison)
