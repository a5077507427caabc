"""Interface of search spaces: immutable states, and legal moves between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

Tags = frozenset[str]
NO_TAGS: Tags = frozenset()


class Move(Protocol):
    """A move with tags.  Strategies select moves by tag, independent of the kind of space."""

    @property
    def tags(self) -> Tags: ...


S = TypeVar("S")
M = TypeVar("M", bound=Move)


class Space(ABC, Generic[S, M]):
    """States of type ``S``, connected by moves of type ``M``.

    :meth:`draw` makes one attempt of the proposal distribution, and returns None if the move drawn
    is illegal.  :meth:`propose` repeats it until a move is legal (rejection sampling), so proposals
    are uniform over the legal moves without enumerating them.
    """

    max_draws: int = 256
    """Attempts of :meth:`propose` before it enumerates all legal moves."""

    @abstractmethod
    def start(self) -> S:
        """The state in which every search starts (the original program)."""

    @abstractmethod
    def draw(self, state: S, rng: np.random.Generator, required_tags: Tags = NO_TAGS) -> M | None:
        """Draw one move, uniform over all conceivable moves that have all ``required_tags``.

        Returns None if the move is illegal in ``state``.
        """

    @abstractmethod
    def moves(self, state: S) -> Iterator[M]:
        """Yield every legal move of ``state`` exactly once, in a fixed order."""

    @abstractmethod
    def apply(self, state: S, move: M) -> S:
        """The state after ``move``.

        Raises :class:`~nostall.core.errors.IllegalMove` if the move is illegal in ``state``.
        """

    @abstractmethod
    def key(self, state: S) -> bytes:
        """An identifier of the state: equal for equal states, different for different ones."""

    @abstractmethod
    def dump(self, state: S) -> str:
        """Serialize a state as one line of text; :meth:`load` is the inverse."""

    @abstractmethod
    def load(self, text: str) -> S:
        """Restore a state from the text of :meth:`dump`."""

    def propose(
        self, state: S, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> M | None:
        """Draw a legal move, uniform over those that have all ``required_tags``.

        Returns None if no legal move has these tags.
        """
        for _ in range(self.max_draws):
            move = self.draw(state, rng, required_tags)
            if move is not None:
                return move
        legal = [move for move in self.moves(state) if required_tags <= move.tags]
        return legal[int(rng.integers(len(legal)))] if legal else None
