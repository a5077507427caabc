"""Interface of search strategies: spend a budget on a space under an objective, reproducibly."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

from nostall.core.errors import BadInput
from nostall.core.measurement import Measurement
from nostall.core.objective import Objective
from nostall.core.space import M, S, Space
from nostall.core.validation import parse_json

T = TypeVar("T")
Stop = Literal["budget", "finished", "interrupted", "no legal move"]
"""Why a search stopped."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a search; at least one of them is required."""

    seconds: float | None = None
    """Wall-clock time."""
    evaluations: int | None = None
    """Evaluations of the objective, including the start state."""

    def __post_init__(self) -> None:
        limits = [x for x in (self.seconds, self.evaluations) if x is not None]
        if not limits or not all(x > 0 for x in limits):
            raise BadInput(
                f"budget is seconds={self.seconds}, evaluations={self.evaluations}; give at least "
                "one of them, greater than 0"
            )

    def clock(self) -> BudgetClock:
        """Start to spend the budget."""
        return BudgetClock(self, monotonic())


@dataclass(slots=True)
class BudgetClock:
    """A budget that is being spent since ``started`` (on the monotonic clock)."""

    budget: Budget
    started: float

    def spent(self, evaluations: int) -> bool:
        """Whether the time is over, or ``evaluations`` reaches the limit."""
        limit = self.budget.evaluations
        if limit is not None and evaluations >= limit:
            return True
        return self.budget.seconds is not None and self.elapsed >= self.budget.seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return monotonic() - self.started


@dataclass(frozen=True, slots=True)
class Trial:
    """One evaluated proposal of a search: a row of ``trials.csv``."""

    index: int
    """Number of the evaluation; 0 is the start state."""
    value: float
    """Cost of the proposed state; infinity if it could not be evaluated."""
    accepted: bool
    """Whether the search moved to the proposed state."""
    best: float
    """Lowest cost so far."""
    move: str
    """Text of the move."""
    rejected: int
    """Illegal proposals so far.  They do not count as evaluations."""
    seconds: float
    """Time since the search started."""
    failure: str | None = None
    """Why the state could not be evaluated, or None."""


CHECKPOINT_VERSION = 2
_VERSION_1_KEYS = {
    "walked": "steps",
    "gained": "improved_at",
    "spread": "change_sum",
    "seen": "change_count",
    "free": "cached_steps",
    "throws": "perturbations",
    "favours": "explores",
    "accepts": "acceptance",
}
"""Names in :attr:`Checkpoint.memory` that version 2 changed."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """State of a search, complete enough to resume it.

    Under a modelled objective, a resumed search visits the same states as an uninterrupted one.
    """

    strategy: str
    """Name of the strategy."""
    seed: int
    evaluations: int
    rejected: int
    """Illegal proposals so far."""
    current: str
    """The current state, as :meth:`Space.dump` writes it."""
    current_value: float
    best: str
    """The best state, as :meth:`Space.dump` writes it."""
    best_value: float
    rng: dict[str, Any]
    """State of the random number generator."""
    memory: dict[str, float]
    """Further numbers of the strategy, such as a temperature."""
    population: list[dict[str, Any]] = field(default_factory=list)
    """States of a strategy that keeps several: ``state`` as :meth:`Space.dump` writes it, and its
    ``values``."""

    def dump(self) -> str:
        """As JSON, with the version of the format."""
        return json.dumps({"version": CHECKPOINT_VERSION, **asdict(self)})

    @classmethod
    def load(cls, text: str) -> Checkpoint:
        """The checkpoint of a JSON text in this version or an earlier one.

        Raises ValueError or TypeError for other texts.
        """
        content = parse_json(text)
        if not isinstance(content, dict) or not isinstance(content.get("memory"), dict):
            raise ValueError(f"{text[:60]!r} is no checkpoint: allowed is an object with `memory`")
        version = content.pop("version", 1)
        if version not in (1, CHECKPOINT_VERSION):
            raise ValueError(f"version is {version!r}; allowed are 1 and {CHECKPOINT_VERSION}")
        if version == 1:
            memory = content["memory"].items()
            content["memory"] = {_VERSION_1_KEYS.get(key, key): value for key, value in memory}
        return cls(**content)


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[T]):
    """Result of a search."""

    best: T
    """The best state; the start state if none was better."""
    best_measurement: Measurement
    start_measurement: Measurement
    evaluations: int
    rejected: int
    """Illegal proposals, which do not count as evaluations."""
    seconds: float
    stopped: Stop
    checkpoint: Checkpoint

    @property
    def ratio(self) -> float:
        """Cost of the start state / cost of the best state; above 1 the search improved it."""
        return self.start_measurement.value / self.best_measurement.value


class Observer(Protocol):
    """Receives the events of a search; must not change the search."""

    def on_trial(self, trial: Trial) -> None: ...

    def on_checkpoint(self, checkpoint: Checkpoint) -> None: ...


class Search(ABC):
    """A search strategy for any space.

    The result is deterministic (bit for bit) for a given seed if the objective is modelled.
    """

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
        """Search until the budget is spent.

        ``resume`` continues from a checkpoint.  On ``KeyboardInterrupt`` the search stops and
        returns the best state so far.
        """
