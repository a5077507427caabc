"""Legal variants of real cubins, recorded in a store as if they were verified and measured."""

from __future__ import annotations

import functools

import numpy as np

from nostall.sass import Program
from nostall.sass.schedule import ScheduleSpace
from nostall.store import Row, Store
from tests.unit.store.records import provenance

GPU = "A GPU of the tests"


@functools.cache
def variant(original: bytes, seed: int = 0, moves: int = 30) -> bytes:
    """The cubin with its instructions in another legal order."""
    program = Program.from_cubin(original)
    space = ScheduleSpace(program, program.kernels[0])
    state, rng = space.start(), np.random.default_rng(seed)
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is not None:
            state = space.apply(state, move)
    cubin = space.impose(state).to_cubin()
    assert cubin != original
    return cubin


def keep_variant(store: Store, original: bytes, *, dependent_launch: bool = False) -> Row:
    """Record a variant of a cubin in the store."""
    program = Program.from_cubin(original)
    optimised = variant(original)
    about = provenance(
        original,
        optimised,
        kernel=program.kernels[0].name,
        gpu=GPU,
        device={"gpu": GPU},
        architecture=f"sm_{program.sm}",
        dependent_launch=dependent_launch,
    )
    return store.record(original, optimised, about)
