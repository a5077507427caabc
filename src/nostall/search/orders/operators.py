"""Proposals of the search over orders, how each was made, and the spaces that offer them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, runtime_checkable

import numpy as np

from nostall.core.space import NO_TAGS, S, Tags

Kind = Literal["given", "reorder", "moves"]

SIGMAS = (1.0, 3.0, 8.0, 20.0)
"""Standard deviations of a re-ordering, in positions."""
MOVE_COUNTS = (1, 2, 4, 8, 16)
"""Numbers of single moves, for spaces that cannot re-order."""


@runtime_checkable
class ReorderSpace(Protocol):
    """A space whose states are orders of instructions in blocks."""

    def reorder(
        self,
        state: Any,
        rng: np.random.Generator,
        sigma: float,
        blocks: Sequence[int] | None = None,
    ) -> Any:
        """A random legal order near that of ``state``, changed in ``blocks`` (None: in all)."""
        ...


@runtime_checkable
class PortfolioSpace(Protocol):
    """A space that knows states which are worth a try in every search."""

    def portfolio(self) -> Sequence[Any]:
        """States that each differ from the start state in one respect."""
        ...

    def combine(self, first: Any, second: Any) -> Any | None:
        """The state with the changes of both; None if they exclude each other."""
        ...


@dataclass(frozen=True, slots=True)
class Operator:
    """One way to make a new state from known ones."""

    kind: Kind
    sigma: float = 0.0
    count: int = 0
    """Moves of ``moves``."""
    tags: Tags = NO_TAGS
    """Tags of the moves of ``moves``."""

    def __str__(self) -> str:
        if self.kind == "reorder":
            return f"reorder sigma={self.sigma:g} all"
        if self.kind == "moves":
            kind = " ".join(["moves", *sorted(self.tags)])
            return f"{kind} x{self.count}"
        return self.kind


GIVEN = Operator("given")
"""The operator of a state that is known: of the portfolio, or measured again."""


@dataclass(frozen=True, slots=True)
class Proposal(Generic[S]):
    """A state to be made: :meth:`realize` makes it, in this process or in another one."""

    operator: Operator
    parent: S
    seed: tuple[int, ...] = (0,)
    """Seed of the operator's random choices."""

    def realize(self, space: Any) -> S:
        """The state; the parent itself if the operator finds no legal change."""
        operator, state = self.operator, self.parent
        if operator.kind == "given":
            return state
        rng = np.random.default_rng(self.seed)
        if operator.kind == "reorder":
            reordered: S = space.reorder(state, rng, operator.sigma)
            return reordered
        for _ in range(operator.count):
            move = space.propose(state, rng, operator.tags)
            if move is None:
                break
            state = space.apply(state, move)
        return state
