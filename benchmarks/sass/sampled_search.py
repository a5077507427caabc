"""A search that is looked at: some of its candidates are sample, to ask the SM model about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from benchmarks.harness.rank_agreement import agreement
from benchmarks.harness.schema import Modelled
from nostall.core import (
    Budget,
    Checkpoint,
    LaunchSpec,
    Measurement,
    NostallError,
    Objective,
    Observer,
)
from nostall.core.measurement import Kind
from nostall.core.search import Search, SearchResult
from nostall.sass.model import SmModel
from nostall.sass.schedule import Schedule, ScheduleSpace

SAMPLE_SIZE = 300
"""Candidates sample of a search."""
_MIN_PAIRS = 10
"""Below that a rank correlation says nothing."""


class SampledSearch(Search):
    """Passes on ``search`` and keeps up to ``size`` of its timed candidates, all equally likely."""

    name: ClassVar[str] = "watched"

    def __init__(self, search: Search, size: int = SAMPLE_SIZE) -> None:
        self.search, self.size = search, size
        self.sample: list[tuple[Schedule, float]] = []
        self.space: ScheduleSpace | None = None

    def run(
        self,
        space: Any,
        objective: Objective[Any],
        budget: Budget,
        *,
        seed: int = 0,
        observers: Sequence[Observer] = (),
        resume: Checkpoint | None = None,
    ) -> SearchResult[Any]:
        """As ``search`` does."""
        sampling = _SamplingObjective(objective, self.size, seed)
        self.sample, self.space = sampling.sample, space
        return self.search.run(
            space, sampling, budget, seed=seed, observers=observers, resume=resume
        )


class _SamplingObjective(Objective[Schedule]):
    """A measured objective that keeps a uniform sample of what was asked (reservoir sampling)."""

    kind: ClassVar[Kind] = "measured"
    unit: ClassVar[str] = "s"

    def __init__(self, objective: Objective[Schedule], size: int, seed: int) -> None:
        self.objective, self.flops, self.size = objective, objective.flops, size
        self.sample: list[tuple[Schedule, float]] = []
        self._rng, self._seen = np.random.default_rng([seed, size]), 0

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        measurements = self.objective.evaluate(states)
        for state, measurement in zip(states, measurements, strict=True):
            if measurement.failure is None:
                self._add_to_sample(state, measurement.value)
        return measurements

    def _add_to_sample(self, state: Schedule, value: float) -> None:
        self._seen += 1
        if len(self.sample) < self.size:
            self.sample.append((state, value))
        elif (slot := int(self._rng.integers(self._seen))) < self.size:
            self.sample[slot] = (state, value)


def model_sample(search: SampledSearch, launch: LaunchSpec) -> Modelled | None:
    """What the SM model says of the measured candidates; None for too few of them, or for a kernel
    that the model does not take."""
    if search.space is None:
        return None
    try:
        model = SmModel(search.space.program, search.space.function, launch)
    except NostallError:
        return None
    measurements = model.evaluate([state for state, _ in search.sample])
    pairs = tuple(
        (round(m.value * 1e6, 5), round(seconds * 1e6, 5))
        for m, (_, seconds) in zip(measurements, search.sample, strict=True)
        if m.failure is None
    )
    if len(pairs) < _MIN_PAIRS:
        return None
    tau, error = agreement(pairs)
    return Modelled(us=pairs, kendall_tau=tau, error=error)
