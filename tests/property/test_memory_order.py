"""Moves keep the memory order: no load passes one of the same place, no fence loses an access."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from nostall.sass import Program
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.safety.order import order_findings
from nostall.sass.safety.symbolic.validator import SymbolicValidator
from nostall.sass.schedule import Schedule, ScheduleSpace
from tests.corpus import catalogue
from tests.mutations.memory_order_violations import may_read_the_same

READS = ("coherent_reads", "maybe_coherent_reads", "overlapping_reads", "shared_acquire")
FENCES = ("acquire_gpu", "exchange_unread", "fence_acq_rel_cta", "loads_after_fence")
STEP = 12
"""Every how many-th offered move the verifier checks."""


@lru_cache
def _space(cubin: str, kernel: str) -> ScheduleSpace:
    program = Program.from_cubin((catalogue.NVCC / f"{cubin}.cubin").read_bytes())
    return ScheduleSpace(program, program.function(kernel))


def _walk(space: ScheduleSpace, moves: int, seed: int) -> Schedule:
    rng, state = np.random.default_rng(seed), space.start()
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is not None:
            state = space.apply(state, move)
    return state


def _pairs_in_order(space: ScheduleSpace) -> list[tuple[int, int]]:
    """(first, second) indices of loads that may read the same shared location."""
    loads = [i for i in space.function.instructions if i.base == "LDS" and not i.never_executes]
    return [
        (a.index, b.index)
        for at, a in enumerate(loads)
        for b in loads[at + 1 :]
        if may_read_the_same(a, b)
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("kernel", READS)
def test_no_offered_move_swaps_two_reads_of_one_location(kernel: str, arch: str) -> None:
    space = _space(f"shared_order.{arch}", kernel)
    pairs = _pairs_in_order(space)
    assert pairs or kernel == "shared_acquire"
    for moves in (0, 12, 40):
        state = _walk(space, moves, seed=moves)
        for move in space.moves(state):
            order = space.apply(state, move).order.tolist()
            assert all(order.index(a) < order.index(b) for a, b in pairs), str(move)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("kernel", FENCES)
def test_the_verifier_accepts_offered_moves_around_a_fence(kernel: str, arch: str) -> None:
    space = _space(f"memory_order.{arch}", kernel)
    sm = space.program.sm
    hazards, symbolic = HazardValidator(sm), SymbolicValidator(sm)
    state = _walk(space, 15, seed=3)
    for move in list(space.moves(state))[::STEP]:
        candidate = space.apply(state, move).impose(space.function)
        findings = [
            *hazards.compare(space.function, candidate),
            *order_findings(space.function, candidate),
            *symbolic.compare(space.function, candidate),
        ]
        assert not findings, (str(move), [str(f) for f in findings[:3]])
