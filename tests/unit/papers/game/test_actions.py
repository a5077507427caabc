"""Action masks compared with the space: legal actions are exactly the legal moves."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

pytest.importorskip("gymnasium", reason="the game needs the extra nostall[rl]")

from nostall.papers.game.actions import MemorySlides, NeighbourExchanges
from nostall.sass.schedule.moves import Slide
from nostall.sass.schedule.space import ScheduleSpace
from tests.unit.papers.game.kernels import CORPUS, dot_product, largest, transpose

KERNELS = {
    "transpose": transpose,
    "dot_product": dot_product,
    **{
        name: partial(largest, CORPUS / f"{name}.cubin")
        for name in ("hopper.sm_90a", "memory.sm_75")
    },
}
EACH = pytest.mark.parametrize("name", KERNELS)


def _is_legal(space: ScheduleSpace, state, index: int, offset: int) -> bool:
    slide = Slide(index, offset, frozenset(), exact=True)
    return space.apply_if_legal(state, slide) is not None


@EACH
def test_exchanges_of_neighbours_are_legal_if_the_space_allows_them(name: str) -> None:
    space = KERNELS[name]()
    exchanges, rng = NeighbourExchanges(space.graph), np.random.default_rng(1)
    state, count = space.start(), 0
    for step in range(13):
        if step % 12 == 0:
            for number, block in enumerate(space.graph.blocks):
                legal = exchanges.legal(state, number)
                order = state.order[block.start : block.end].tolist()
                for p, index in enumerate(order[:-1]):
                    if not space.graph.fixed[index]:
                        assert legal[p] == _is_legal(space, state, index, 1), (
                            step,
                            block.start + p,
                        )
                        count += legal[p]
                    elif not space.graph.fixed[order[p + 1]]:
                        assert legal[p] == _is_legal(space, state, order[p + 1], -1)
        move = space.propose(state, rng)
        assert move is not None
        state = space.apply(state, move)
    assert count > 20


@EACH
def test_the_mask_is_updated_after_each_move(name: str) -> None:
    space = KERNELS[name]()
    actions, rng = MemorySlides(space.function, space.graph), np.random.default_rng(2)
    state = space.start()
    mask = actions.mask(state)
    for _ in range(25):
        legal = [actions.move(state, int(a)) for a in np.flatnonzero(mask)]
        expected = {
            (index, offset)
            for index in actions.candidates.tolist()
            for offset in (-1, 1)
            if _is_legal(space, state, index, offset)
        }
        assert {(move.index, move.offset) for move in legal} == expected
        if not legal:
            break
        move = legal[int(rng.integers(len(legal)))]
        state = space.apply(state, move)
        mask = actions.mask(state, move)
        assert np.array_equal(mask, MemorySlides(space.function, space.graph).mask(state))
    assert not mask[-1]
