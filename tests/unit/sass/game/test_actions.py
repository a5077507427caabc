"""The mask against the space itself: legal actions are exactly the legal moves."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the game needs the extra nostall[rl]")

from nostall.sass.game.adjacency import Adjacency
from tests.unit.sass.game.kernels import CORPUS, dot_product, largest, transpose

from nostall.sass.game.actions import MemorySlides
from nostall.sass.schedule.moves import Slide
from nostall.sass.schedule.space import ScheduleSpace

KERNELS = {
    "transpose": transpose,
    "dot_product": dot_product,
    **{
        name: partial(largest, CORPUS / f"{name}.cubin")
        for name in ("hopper.sm_90a", "memory.sm_75")
    },
}
EACH = pytest.mark.parametrize("name", KERNELS)


def _exact(space: ScheduleSpace, state, index: int, by: int) -> bool:
    return space._try(state, Slide(index, by, frozenset(), exact=True)) is not None


@EACH
def test_every_exchange_of_neighbours_is_judged_as_the_space_does(name: str) -> None:
    space = KERNELS[name]()
    adjacency, rng = Adjacency(space.graph), np.random.default_rng(1)
    state, legal = space.start(), 0
    for step in range(13):
        if step % 12 == 0:
            for number, block in enumerate(space.graph.blocks):
                said = adjacency.exchanges(state, number)
                span = state.order[block.start : block.end].tolist()
                for p, index in enumerate(span[:-1]):
                    if not space.graph.fixed[index]:
                        assert said[p] == _exact(space, state, index, 1), (step, block.start + p)
                        legal += said[p]
                    elif not space.graph.fixed[span[p + 1]]:
                        assert said[p] == _exact(space, state, span[p + 1], -1)
        move = space.propose(state, rng)
        assert move is not None
        state = space.apply(state, move)
    assert legal > 20


@EACH
def test_the_mask_is_kept_up_to_date(name: str) -> None:
    space = KERNELS[name]()
    actions, rng = MemorySlides(space.function, space.graph), np.random.default_rng(2)
    state = space.start()
    mask = actions.mask(state)
    for _ in range(25):
        legal = [actions.move(state, int(a)) for a in np.flatnonzero(mask)]
        wanted = {
            (index, by)
            for index in actions.candidates.tolist()
            for by in (-1, 1)
            if _exact(space, state, index, by)
        }
        assert {(move.index, move.by) for move in legal} == wanted
        if not legal:
            break
        move = legal[int(rng.integers(len(legal)))]
        state = space.apply(state, move)
        mask = actions.mask(state, move)
        assert np.array_equal(mask, MemorySlides(space.function, space.graph).mask(state))
    assert not mask[-1]
