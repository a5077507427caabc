"""Space of the assembler search: a PTX space with a portfolio."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

import numpy as np

from nostall.core import Space, Tags
from nostall.core.space import NO_TAGS
from nostall.ptx.program.module import parse
from nostall.ptx.schedule.hints import HINTS, allowed_hints
from nostall.ptx.schedule.levers import Levers, with_lever
from nostall.ptx.schedule.moves import PtxMove
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState

_ORDERS = "orders"
_SETTINGS = tuple(field.name for field in fields(PtxState) if field.name != _ORDERS)


class AssemblerSpace(Space[PtxState, PtxMove]):
    """A :class:`PtxSpace` that also offers the states of a portfolio."""

    def __init__(self, ptx: PtxSpace, levers: Levers) -> None:
        self.ptx, self.levers = ptx, levers

    def start(self) -> PtxState:
        return self.ptx.start()

    def draw(
        self, state: PtxState, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> PtxMove | None:
        return self.ptx.draw(state, rng, required_tags)

    def moves(self, state: PtxState) -> Iterator[PtxMove]:
        return self.ptx.moves(state)

    def apply(self, state: PtxState, move: PtxMove) -> PtxState:
        return self.ptx.apply(state, move)

    def key(self, state: PtxState) -> bytes:
        return self.ptx.key(state)

    def dump(self, state: PtxState) -> str:
        return self.ptx.dump(state)

    def load(self, text: str) -> PtxState:
        return self.ptx.load(text)

    def text(self, state: PtxState) -> str:
        """The PTX of a state."""
        return self.ptx.text(state)

    def reorder(
        self,
        state: PtxState,
        rng: np.random.Generator,
        sigma: float,
        blocks: Sequence[int] | None = None,
    ) -> PtxState:
        """A random legal order near that of ``state``; see :meth:`PtxSpace.reorder`."""
        return self.ptx.reorder(state, rng, sigma, blocks)

    def portfolio(self) -> list[PtxState]:
        """States that each have one setting of the levers, or one hint wherever it is allowed."""
        start = self.start()
        states = [with_lever(start, lever, value) for lever, value in self.levers.values()]
        allowed = [(i.index, allowed_hints(i)) for i in self.ptx.kernel.instructions]
        for hint in HINTS:
            hints = tuple((index, hint) for index, possible in allowed if hint in possible)
            states.append(replace(start, hints=hints))
        return list(dict.fromkeys(state for state in states if state != start))

    def combine(self, first: PtxState, second: PtxState) -> PtxState | None:
        """The state with the settings of both; None if they set the same one.

        Options of both are used if they are different options.
        """
        start = self.start()
        changed = {n for n in _SETTINGS if getattr(first, n) != getattr(start, n)}
        also = {n for n in _SETTINGS if getattr(second, n) != getattr(start, n)}
        if changed & also == {"options"}:
            names = [option.partition("=")[0] for option in (*first.options, *second.options)]
            if len(set(names)) < len(names):
                return None
            return replace(first, options=(*first.options, *second.options))
        if changed & also:
            return None
        return replace(first, **{name: getattr(second, name) for name in also})


def make_space(ptx: str, kernel: str, levers: Levers) -> AssemblerSpace:
    """The space of one kernel of a PTX text.

    Raises :class:`~nostall.core.errors.BadInput` if the text is not PTX or lacks the kernel.
    """
    space = PtxSpace(parse(ptx), kernel, levers)
    return AssemblerSpace(space, space.levers)
