"""Operators of the evolutionary search, and the spaces that offer more than single moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Generic, Literal, Protocol, runtime_checkable

import numpy as np

from nostall.core import BadInput, Space
from nostall.core.space import NO_TAGS, M, S, Tags

Kind = Literal["given", "reorder", "recombine", "moves"]
Scope = Literal["all", "hot"]

SIGMAS = (1.0, 3.0, 8.0, 20.0)
"""Standard deviations of a re-ordering, in positions."""
MOVE_COUNTS = (1, 2, 4, 8, 16)
"""Numbers of single moves, for spaces that cannot re-order."""
LEVER: Tags = frozenset({"lever"})


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

    def recombine(self, first: Any, second: Any, rng: np.random.Generator) -> Any:
        """A state with the order of each block from one of the two parents."""
        ...

    def block_weights(self) -> Sequence[float]:
        """How much a change of each block is expected to matter."""
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
    scope: Scope = "all"
    """Blocks that ``reorder`` changes: all, or one that is drawn by its weight."""
    count: int = 0
    """Moves of ``moves``."""
    tags: Tags = NO_TAGS
    """Tags of the moves of ``moves``."""

    def __str__(self) -> str:
        if self.kind == "reorder":
            return f"reorder sigma={self.sigma:g} {self.scope}"
        if self.kind == "moves":
            kind = " ".join(["moves", *sorted(self.tags)])
            return f"{kind} x{self.count}"
        return self.kind


GIVEN = Operator("given")
"""The operator of a state that is known: of the portfolio, or measured again."""


@dataclass(frozen=True, slots=True)
class Proposal(Generic[S]):
    """A state to be made: :func:`realize` makes it, in this process or in another one."""

    operator: Operator
    parent: S
    other: S | None = None
    """The second parent of ``recombine``."""
    seed: tuple[int, ...] = (0,)
    """Seed of the operator's random choices."""


IMMIGRANTS = "immigrants"
"""Name of the operator that re-orders the start state or one of the portfolio."""


def operators_of(space: Space[S, M], without: Sequence[str] = ()) -> tuple[Operator, ...]:
    """The operators that a space supports, without those whose names match a pattern.

    Raises :class:`~nostall.core.errors.BadInput` for a pattern without a match, and if no operator
    is left.
    """
    supported = _supported(space)
    names = [str(operator) for operator in supported]
    left = [o for o in supported if not any(fnmatchcase(str(o), p) for p in without)]
    unknown = [p for p in without if p != IMMIGRANTS and not any(fnmatchcase(n, p) for n in names)]
    if unknown or not left:
        raise BadInput(
            f"evolve got without={list(without)}; the operators of this space are "
            f"{[*names, IMMIGRANTS]}; give patterns that match some of them, not all"
        )
    return tuple(left)


def _supported(space: Space[S, M]) -> tuple[Operator, ...]:
    if isinstance(space, ReorderSpace):
        reorders = [Operator("reorder", sigma, scope) for sigma in SIGMAS for scope in _SCOPES]
        return (*reorders, Operator("recombine"), Operator("moves", count=1, tags=LEVER))
    return tuple(Operator("moves", count=count) for count in MOVE_COUNTS)


_SCOPES: tuple[Scope, ...] = ("all", "hot")


def realize(space: Any, proposal: Proposal[S]) -> S:
    """The state of a proposal; the parent itself if the operator finds no legal change."""
    operator, state = proposal.operator, proposal.parent
    rng = np.random.default_rng(proposal.seed)
    if operator.kind == "given":
        return state
    if operator.kind == "reorder":
        blocks = None if operator.scope == "all" else [_draw_block(space.block_weights(), rng)]
        reordered: S = space.reorder(state, rng, operator.sigma, blocks)
        return reordered
    if operator.kind == "recombine":
        recombined: S = space.recombine(state, proposal.other, rng)
        return recombined
    for _ in range(operator.count):
        move = space.propose(state, rng, operator.tags)
        if move is None:
            break
        state = space.apply(state, move)
    return state


def _draw_block(weights: Sequence[float], rng: np.random.Generator) -> int:
    """A block, drawn by its weight."""
    share = np.asarray(weights, dtype=np.float64)
    if not share.any():
        share = np.ones(len(share))
    return int(rng.choice(len(share), p=share / share.sum()))
