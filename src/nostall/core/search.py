"""A search: spends a budget on a space under an objective, reproducibly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from nostall.core.errors import BadInput
from nostall.core.measurement import Measurement
from nostall.core.objective import Objective
from nostall.core.space import M, S, Space

T = TypeVar("T")
Stop = Literal["budget", "finished", "interrupted", "no legal move"]


@dataclass(frozen=True, slots=True)
class Budget:
    """How long a search may run; at least one limit is needed."""

    seconds: float | None = None
    evaluations: int | None = None

    def __post_init__(self) -> None:
        limits = [x for x in (self.seconds, self.evaluations) if x is not None]
        if not limits or not all(x > 0 for x in limits):
            raise BadInput(
                f"budget is seconds={self.seconds}, evaluations={self.evaluations}; give at least "
                "one of them, greater than 0"
            )

    def clock(self) -> Clock:
        return Clock(self, monotonic())


@dataclass(slots=True)
class Clock:
    """A budget that has started to run."""

    budget: Budget
    started: float

    def spent(self, evaluations: int) -> bool:
        limit = self.budget.evaluations
        if limit is not None and evaluations >= limit:
            return True
        return self.budget.seconds is not None and self.elapsed >= self.budget.seconds

    @property
    def elapsed(self) -> float:
        return monotonic() - self.started


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluated proposal.

    ``index`` counts evaluations from 0 (the start state); ``rejected`` counts the illegal
    proposals so far, which are not charged as evaluations; ``move`` is the move's text.
    """

    index: int
    value: float
    accepted: bool
    best: float
    move: str
    rejected: int
    seconds: float
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """All that is needed to go on: with a modelled objective a resumed search and an
    uninterrupted one visit the same states."""

    strategy: str
    seed: int
    evaluations: int
    rejected: int
    current: str
    current_value: float
    best: str
    best_value: float
    rng: dict[str, Any]
    memory: dict[str, float]


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[T]):
    """What a search found.  ``best`` is the start state when nothing better came up."""

    best: T
    best_measurement: Measurement
    start_measurement: Measurement
    evaluations: int
    rejected: int
    seconds: float
    stopped: Stop
    checkpoint: Checkpoint

    @property
    def ratio(self) -> float:
        """Start / best, as the search saw it: above 1 something better was found."""
        return self.start_measurement.value / self.best_measurement.value


class Observer(Protocol):
    """Watches a search; must not change it."""

    def on_trial(self, trial: Trial) -> None: ...

    def on_checkpoint(self, checkpoint: Checkpoint) -> None: ...


class Search(ABC):
    """A strategy over any space.  Same seed and a modelled objective: same result, bit for bit."""

    name: ClassVar[str]

    @abstractmethod
    def run(
        self,
        space: Space[S, M],
        objective: Objective[S],
        budget: Budget,
        *,
        seed: int = 0,
        observers: Sequence[Observer] = (),
        resume: Checkpoint | None = None,
    ) -> SearchResult[S]:
        """Search until the budget is spent; ``KeyboardInterrupt`` ends it with what was found."""
