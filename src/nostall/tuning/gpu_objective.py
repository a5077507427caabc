"""Measured objective: time schedules on a device, and decide whether the result is faster.

During a search each candidate is timed in pairs with the original, so that clock drift cancels.
The best of thousands of noisy values is mostly luck.  So the finalists are timed again in a race
(:mod:`nostall.search.race`), and a comparison in a fresh process decides whether the winner
replaces the original.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from nostall.core import BadInput, Comparison, Measurement, Objective
from nostall.core.measurement import Kind
from nostall.core.objective import S_contra
from nostall.gpu import AsyncDevice, Device, Outcome
from nostall.sass.schedule import Patcher, Schedule, ScheduleSpace
from nostall.search.race import race

S = TypeVar("S")

MAX_FINALISTS = 12
"""Candidates that take part in the race after the search."""


class GpuObjective(Objective[Schedule]):
    """Seconds per launch of a schedule, measured by a device.

    The value of a candidate is the original's time at the start of the search, times the median
    ratio candidate / original of the interleaved pairs.
    """

    kind: ClassVar[Kind] = "measured"
    unit: ClassVar[str] = "s"

    def __init__(self, space: ScheduleSpace, device: Device, flops: float | None = None) -> None:
        """``flops``: floating-point operations of one launch, if known."""
        self.space, self.device, self.flops = space, device, flops
        self._patcher = Patcher(space.program, space.function)
        self.original_s: float | None = None
        """Time of the original in the first evaluation; None before it."""
        self.outcome_counts: Counter[str] = Counter()
        """Number of candidates by status of their outcome."""
        self.phase_seconds: defaultdict[str, float] = defaultdict(float)
        """Total seconds by phase: ``patch``, and the phases of the device."""
        self.failures: list[str] = []
        """Status and detail of each candidate that was not timed."""
        self._prefetched: list[tuple[Schedule, bytes]] = []
        self._best: list[tuple[float, bytes, Schedule]] = []
        """Heap of the finalists: (negative value, key, schedule), the worst first."""

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        return [self.measure(state, iter(())) for state in states]

    def measure(self, state: Schedule, upcoming: Iterator[Schedule]) -> Measurement:
        """Measure one schedule.

        While the device is busy, ``upcoming`` schedules are patched and announced to the device.
        """
        cubin = self._cubin(state)
        if not isinstance(self.device, AsyncDevice):
            return self._record(state, self.device.evaluate(cubin))
        pending = self.device.start(cubin)
        prefetched: list[tuple[Schedule, bytes]] = []
        try:
            while not pending.ready() and (following := next(upcoming, None)) is not None:
                prefetched.append((following, self._cubin(following)))
                pending.prefetch(prefetched[-1][1])
        finally:  # always take the outcome, or the next evaluation would get it
            outcome = pending.wait()
        self._prefetched = prefetched
        return self._record(state, outcome)

    def finalists(self) -> list[Schedule]:
        """The schedules with the best values so far, best first."""
        return [state for *_, state in sorted(self._best, reverse=True)]

    def snapshot(self) -> dict[str, Any]:
        """State that a checkpoint of the search lacks, as JSON: original's time and finalists."""
        finalists = [[-value, self.space.dump(state)] for value, _, state in sorted(self._best)]
        return {"anchor": self.original_s, "finalists": finalists}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Load a :meth:`snapshot`; its finalists are added to those that are known already."""
        self.original_s = snapshot["anchor"]
        for value, state in snapshot["finalists"]:
            self._add_finalist(self.space.load(state), value)

    def _cubin(self, state: Schedule) -> bytes:
        """The cubin of ``state``; one that was prefetched is not patched again."""
        prefetched, self._prefetched = self._prefetched, []
        for known, cubin in prefetched:
            if known is state:
                return cubin
        start = perf_counter()
        cubin = self._patcher.patch(state)
        self.phase_seconds["patch"] += perf_counter() - start
        return cubin

    def _record(self, state: Schedule, outcome: Outcome) -> Measurement:
        """Add an outcome to the statistics and the finalists, and return it as a measurement."""
        self.outcome_counts[outcome.status] += 1
        for phase, seconds in outcome.phase_seconds.items():
            self.phase_seconds[phase] += seconds
        if outcome.timing is None:
            failure = f"{outcome.status}: {outcome.detail}"
            self.failures.append(failure)
            return Measurement("s", (), "measured", failure=failure)
        original = np.asarray(outcome.timing.original)
        ratios = np.asarray(outcome.timing.candidate) / original
        if self.original_s is None:
            self.original_s = float(np.median(original))
        samples = tuple(float(x) for x in self.original_s * ratios)
        measurement = Measurement("s", samples, "measured", dict(self.device.info))
        self._add_finalist(state, measurement.value)
        return measurement

    def _add_finalist(self, state: Schedule, value: float) -> None:
        # Ties are broken by the key, so that a resumed search has the same finalists.
        entry = (-value, state.key(), state)
        if any(finalist[1] == entry[1] for finalist in self._best):
            return
        heapq.heappush(self._best, entry)
        if len(self._best) > MAX_FINALISTS:
            heapq.heappop(self._best)


class AnchoredObjective(Protocol[S_contra]):
    """An objective whose values are relative to the original's time in its first evaluation."""

    @property
    def original_s(self) -> float | None: ...

    def evaluate(self, states: Sequence[S_contra]) -> list[Measurement]: ...


def race_states(objective: AnchoredObjective[S], states: Sequence[S]) -> list[S]:
    """The states that are not shown to be slower than the original or another; best first.

    Earlier values do not count, because the states were selected by them.  Each new value is the
    ratio to the original in a module load of its own.
    """

    def ratio(number: int) -> float:
        (measurement,) = objective.evaluate([states[number]])
        if measurement.failure is not None or objective.original_s is None:
            return math.nan
        return objective.original_s / measurement.value

    return [states[number] for number in race(ratio, len(states)).remaining]


@dataclass(frozen=True)
class Decision:
    """Final comparison of a candidate with the original, on fresh inputs in a fresh process."""

    outcome: Outcome
    comparison: Comparison | None
    """None if the candidate was not timed."""

    @property
    def faster(self) -> bool:
        """Whether the candidate is faster beyond the noise of the original against itself."""
        return self.comparison is not None and self.comparison.verdict == "faster"


def decide(device: Device, cubin: bytes, rounds: int, checks: int, seed: int = 0) -> Decision:
    """Compare ``cubin`` with the original on ``checks`` random inputs and in ``rounds`` samples.

    ``seed`` is that of the bootstrap of the confidence interval.  A candidate that fails is not
    faster.  Raises :class:`BadInput` for fewer than 2 rounds or 1 check.
    """
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
