"""Safe variants of real cubins, recorded as if a GPU had measured them."""

from __future__ import annotations

import functools

import numpy as np
from tests.unit.store.records import provenance

from nostall.sass import Program, verify
from nostall.sass.schedule import ScheduleSpace
from nostall.store import Row, Store, Verification

GPU = "A GPU of the tests"


def variant(original: bytes, seed: int = 0, moves: int = 30) -> bytes:
    """Another legal order of the same instructions."""
    program = Program.from_cubin(original)
    space = ScheduleSpace(program, program.kernels[0])
    state, rng = space.start(), np.random.default_rng(seed)
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is not None:
            state = space.apply(state, move)
    found = space.impose(state).to_cubin()
    assert found != original
    return found


@functools.cache
def verified(original: bytes) -> tuple[bytes, int]:
    """A variant that the verifier accepts, and how many instructions it looked at."""
    optimised = variant(original)
    verdict = verify(original, optimised)
    assert verdict.safe
    return optimised, verdict.checked


def keep_variant(store: Store, original: bytes) -> Row:
    """Record a verified variant."""
    optimised, checked = verified(original)
    program = Program.from_cubin(original)
    about = provenance(
        original,
        optimised,
        kernel=program.kernels[0].name,
        gpu=GPU,
        device={"gpu": GPU},
        architecture=f"sm_{program.sm}",
        verified=Verification(safe=True, checked=checked, nostall="0.1.0", nvdisasm="V13.5.37"),
    )
    return store.record(original, optimised, about)
