"""A search space: immutable states, pure moves, and only legal ones on offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

Tags = frozenset[str]
NO_TAGS: Tags = frozenset()


class Move(Protocol):
    """Anything with tags; a strategy filters by tag and so needs to know nothing of the level."""

    @property
    def tags(self) -> Tags: ...


S = TypeVar("S")
M = TypeVar("M", bound=Move)


class Space(ABC, Generic[S, M]):
    """States of type ``S`` joined by moves of type ``M``.

    ``draw`` is the primitive: one attempt of the proposal distribution, ``None`` when what was
    drawn is illegal.  ``propose`` repeats it until a legal move comes up, which makes the result
    uniform over the legal moves without enumerating them.
    """

    patience: int = 256
    """Draws that ``propose`` makes before it falls back to enumerating."""

    @abstractmethod
    def start(self) -> S:
        """The state that every search begins with (the original program)."""

    @abstractmethod
    def draw(self, state: S, rng: np.random.Generator, wanted: Tags = NO_TAGS) -> M | None:
        """One uniform draw over all conceivable moves that carry every tag in ``wanted``.

        Returns ``None`` when the move drawn is illegal in ``state``.
        """

    @abstractmethod
    def moves(self, state: S) -> Iterator[M]:
        """Every legal move of ``state``, each exactly once, in a fixed order."""

    @abstractmethod
    def apply(self, state: S, move: M) -> S:
        """The state after ``move``; raises :class:`~nostall.core.errors.IllegalMove`."""

    @abstractmethod
    def key(self, state: S) -> bytes:
        """Equal for equal states, different for different ones."""

    @abstractmethod
    def dump(self, state: S) -> str:
        """One line of text from which :meth:`load` restores the state."""

    @abstractmethod
    def load(self, text: str) -> S:
        """The inverse of :meth:`dump`."""

    def propose(self, state: S, rng: np.random.Generator, wanted: Tags = NO_TAGS) -> M | None:
        """A legal move, uniform over those that carry every tag in ``wanted``; None if none."""
        for _ in range(self.patience):
            move = self.draw(state, rng, wanted)
            if move is not None:
                return move
        legal = [move for move in self.moves(state) if wanted <= move.tags]
        return legal[int(rng.integers(len(legal)))] if legal else None
