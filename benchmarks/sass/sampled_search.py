"""A search that is looked at: some of its candidates are kept, to ask the SM model about them."""

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

SIZE = 300
"""Candidates kept of a search."""
_ENOUGH = 10
"""Below that a rank correlation says nothing."""


class Watched(Search):
    """Passes on ``search`` and keeps up to ``size`` of its timed candidates, all equally likely."""

    name: ClassVar[str] = "watched"

    def __init__(self, search: Search, size: int = SIZE) -> None:
        self.search, self.size = search, size
        self.kept: list[tuple[Schedule, float]] = []
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
        listening = _Listening(objective, self.size, seed)
        self.kept, self.space = listening.kept, space
        return self.search.run(
            space, listening, budget, seed=seed, observers=observers, resume=resume
        )


class _Listening(Objective[Schedule]):
    """A measured objective that keeps a uniform sample of what was asked (reservoir sampling)."""

    kind: ClassVar[Kind] = "measured"
    unit: ClassVar[str] = "s"

    def __init__(self, objective: Objective[Schedule], size: int, seed: int) -> None:
        self.objective, self.flops, self.size = objective, objective.flops, size
        self.kept: list[tuple[Schedule, float]] = []
        self._rng, self._seen = np.random.default_rng([seed, size]), 0

    def evaluate(self, states: Sequence[Schedule]) -> list[Measurement]:
        found = self.objective.evaluate(states)
        for state, measurement in zip(states, found, strict=True):
            if measurement.failure is None:
                self._keep(state, measurement.value)
        return found

    def _keep(self, state: Schedule, value: float) -> None:
        self._seen += 1
        if len(self.kept) < self.size:
            self.kept.append((state, value))
        elif (place := int(self._rng.integers(self._seen))) < self.size:
            self.kept[place] = (state, value)


def modelled(watched: Watched, launch: LaunchSpec) -> Modelled | None:
    """What the SM model says of the measured candidates; None for too few of them, or for a kernel
    that the model does not take."""
    if watched.space is None:
        return None
    try:
        model = SmModel(watched.space.program, watched.space.function, launch)
    except NostallError:
        return None
    said = model.evaluate([state for state, _ in watched.kept])
    pairs = tuple(
        (round(m.value * 1e6, 5), round(seconds * 1e6, 5))
        for m, (_, seconds) in zip(said, watched.kept, strict=True)
        if m.failure is None
    )
    if len(pairs) < _ENOUGH:
        return None
    tau, error = agreement(pairs)
    return Modelled(us=pairs, kendall_tau=tau, error=error)
