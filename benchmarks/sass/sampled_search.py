"""A search that keeps a sample of its measured candidates, to compare them with the SM model."""

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
"""Candidates in the sample of a search."""
_MIN_PAIRS = 10
"""Smallest number of candidates for a rank correlation."""


class SampledSearch(Search):
    """Runs ``search`` and keeps a uniform sample of up to ``size`` of its timed candidates."""

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
        """Run ``search`` with an objective that samples its candidates."""
        sampling = _SamplingObjective(objective, self.size, seed)
        self.sample, self.space = sampling.sample, space
        return self.search.run(
            space, sampling, budget, seed=seed, observers=observers, resume=resume
        )


class _SamplingObjective(Objective[Schedule]):
    """A measured objective that keeps a uniform sample of its states (reservoir sampling)."""

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
    """Modelled and measured times of the sampled candidates.

    None if there are too few candidates or the SM model does not support the kernel.
    """
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
