"""Schedules judged by a GPU: the measured objective, and the decision at the end.

During the search each candidate is timed in pairs with the original, so that drifting clocks
cancel.  The best of thousands of noisy values is mostly luck: the finalists are therefore timed
again, longer and longer, and only a fresh process decides whether the last one replaces the
original.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import numpy as np

from nostall.core import BadInput, Comparison, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.gpu import AsyncDevice, Device, Outcome
from nostall.sass.schedule import Patcher, Schedule, ScheduleSpace
from nostall.search.race import race as ran

KEPT = 12
"""Candidates that stay finalists."""


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
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.faults: list[str] = []
        self._ahead: list[tuple[Schedule, bytes]] = []
        self._best: list[tuple[float, bytes, Schedule]] = []

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        return [self.measure(state, iter(())) for state in states]

    def measure(self, state: Schedule, ahead: Iterator[Schedule]) -> Measurement:
        """One state; what ``ahead`` gives is patched, and told, while the device is busy."""
        cubin = self._patched(state)
        if not isinstance(self.device, AsyncDevice):
            return self._judged(state, self.device.evaluate(cubin))
        pending = self.device.start(cubin)
        made: list[tuple[Schedule, bytes]] = []
        try:
            while not pending.ready() and (following := next(ahead, None)) is not None:
                made.append((following, self._patched(following)))
                pending.prefetch(made[-1][1])
        finally:  # the answer is taken whatever happens, or the next question would get it
            outcome = pending.wait()
        self._ahead = made
        return self._judged(state, outcome)

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

    def _patched(self, state: Schedule) -> bytes:
        """The cubin of ``state``, from those made ahead where it is one of them."""
        ahead, self._ahead = self._ahead, []
        for known, cubin in ahead:
            if known is state:
                return cubin
        began = perf_counter()
        cubin = self._patcher.patch(state)
        self.spent["patch"] += perf_counter() - began
        return cubin

    def _judged(self, state: Schedule, outcome: Outcome) -> Measurement:
        self.fates[outcome.status] += 1
        for part, seconds in outcome.phase_seconds.items():
            self.spent[part] += seconds
        if outcome.timing is None:
            self.faults.append(f"{outcome.status}: {outcome.detail}")
            return Measurement("s", (), "measured", failure=f"{outcome.status}: {outcome.detail}")
        original = np.asarray(outcome.timing.original)
        ratios = np.asarray(outcome.timing.candidate) / original
        if self.anchor is None:
            self.anchor = float(np.median(original))
        samples = tuple(float(x) for x in self.anchor * ratios)
        measurement = Measurement("s", samples, "measured", dict(self.device.info))
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
    """The finalists that were not shown to be slower than the original or another one; best first.

    Old values do not count: they are why these states were chosen.  Each new one comes from a load
    of its own and is a ratio to the original beside it.
    """

    def ratio(number: int) -> float:
        (found,) = objective.evaluate([states[number]])
        if found.failure is not None or objective.anchor is None:
            return math.nan
        return objective.anchor / found.value

    return [states[number] for number in ran(ratio, len(states)).remaining]


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
    comparison = Comparison.from_samples(
        timing.original,
        timing.candidate,
        timing.null,
        kind="measured",
        seed=seed,
        loads=timing.loads,
    )
    return Decision(outcome, comparison)
