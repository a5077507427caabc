"""Moves: only legal ones are offered, they do not mutate, the verifier accepts their results."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest

from nostall.core.errors import IllegalMove
from nostall.sass import Program
from nostall.sass.safety.verify import verify_program
from nostall.sass.schedule import Patcher, Schedule, ScheduleSpace
from nostall.sass.schedule.moves import (
    FlipReuse,
    FlipYield,
    IllegalFlipReuse,
    IllegalFlipYield,
    IllegalSetScoreboard,
    IllegalSetStall,
    IllegalSlide,
    IllegalSwap,
    ScheduleMove,
    SetScoreboard,
    SetStall,
    Slide,
    Swap,
)
from nostall.testing import check_space
from tests.corpus import catalogue

MOVES = 150
KERNELS = (
    "softmax.sm_75",
    "cumulative_sum.sm_75",
    "pipelined_copy.sm_80",
    "matmul-single.sm_80",
    "gemm_leakyrelu.sm_86",
    "rmsnorm_loop.sm_89",
    "softmax.sm_90",
    "gemm_leakyrelu-mma.sm_90",
    "batched_gemm-wgmma.sm_90",
    "descriptor_matmul.sm_100",
    "atomics.sm_100",
    "matmul_fp8.sm_120",
)
SMALL_KERNEL = "vector_add.sm_90"
NO_TAGS: frozenset[str] = frozenset()
ERRORS = {
    Slide: IllegalSlide,
    Swap: IllegalSwap,
    SetStall: IllegalSetStall,
    FlipYield: IllegalFlipYield,
    FlipReuse: IllegalFlipReuse,
    SetScoreboard: IllegalSetScoreboard,
}


@lru_cache
def _space(name: str) -> ScheduleSpace:
    catalogue.triton_corpus()
    path = catalogue.folder(catalogue.versions()[1]) / f"{name}.cubin"
    if name not in catalogue.IN_EVERY_SLICE and not path.is_file():
        pytest.skip(f"{name} is not in this slice of the corpus")
    program = Program.from_cubin(path.read_bytes())
    return ScheduleSpace(program, program.kernels[0])


def _random_walk(
    space: ScheduleSpace, moves: int, seed: int
) -> tuple[Schedule, list[ScheduleMove]]:
    rng = np.random.default_rng(seed)
    """Up to ``moves`` random legal moves from the start: (final state, moves)."""
    state, made = space.start(), []
    for _ in range(moves):
        move = space.propose(state, rng)
        if move is None:
            break
        state = space.apply(state, move)
        made.append(move)
    return state, made


def test_every_slice_has_kernels_to_move() -> None:
    assert SMALL_KERNEL in catalogue.IN_EVERY_SLICE
    assert len({*KERNELS} & {*catalogue.IN_EVERY_SLICE}) >= 2


@pytest.mark.parametrize("name", KERNELS)
def test_the_verifier_accepts_the_end_of_a_random_walk(name: str) -> None:
    space = _space(name)
    state, made = _random_walk(space, MOVES, seed=7)
    assert len(made) == MOVES
    candidate = Program.from_cubin(space.impose(state).to_cubin())
    assert candidate.cubin.data != space.program.cubin.data
    verdict = verify_program(space.program, candidate)
    assert verdict.safe, [str(finding) for finding in verdict.findings[:3]]


@pytest.mark.slow
def test_the_schedule_space_fulfils_the_space_contract() -> None:
    check_space(_space(SMALL_KERNEL), steps=12)


def _candidate_moves(space: ScheduleSpace) -> list[ScheduleMove]:
    """Moves of all kinds on all instructions, most of them illegal."""
    moves: list[ScheduleMove] = []
    for index in range(len(space.function.instructions)):
        moves += [Slide(index, by, NO_TAGS) for by in (-16, -3, -1, 1, 2, 16)]
        moves.append(Swap(index, NO_TAGS))
        moves += [SetStall(index, cycles, NO_TAGS) for cycles in (0, 1, 5, 11, 12, 15, 16)]
        moves.append(FlipYield(index, NO_TAGS))
        moves += [FlipReuse(index, slot, NO_TAGS) for slot in range(3)]
        moves += [
            SetScoreboard(index, write, b, NO_TAGS) for write in (False, True) for b in (0, 5)
        ]
    return moves


def _untagged(move: ScheduleMove) -> tuple[str, str]:
    """(class, text) of a move, without its tags."""
    return type(move).__name__, str(move)


@pytest.mark.parametrize("steps", [0, 60])
def test_the_offered_moves_are_exactly_those_that_apply_accepts(steps: int) -> None:
    space = _space(SMALL_KERNEL)
    state, _ = _random_walk(space, steps, seed=3)
    offered = {_untagged(move) for move in space.moves(state)}
    accepted = set()
    rejected = set()
    for move in _candidate_moves(space):
        try:
            space.apply(state, move)
        except IllegalMove as error:
            assert type(error) is ERRORS[type(move)]
            assert str(move) in str(error)
            assert _untagged(move) not in offered
            rejected.add(type(move))
        else:
            accepted.add(_untagged(move))
    changing = {m for m in accepted if not _is_same_stall(space, state, m)}
    assert changing <= offered
    assert accepted
    assert rejected == set(ERRORS)


def _is_same_stall(space: ScheduleSpace, state: Schedule, untagged: tuple[str, str]) -> bool:
    """Whether a move sets the present stall.  Such a move is accepted, but not offered."""
    kind, text = untagged
    if kind != "SetStall":
        return False
    index, _, cycles = text.removeprefix("stall #").partition(" = ")
    return int(state.stall[int(index)]) == int(cycles)


def test_proposals_are_offered_moves_with_the_requested_tags() -> None:
    space = _space(SMALL_KERNEL)
    state, _ = _random_walk(space, 20, seed=1)
    offered = set(space.moves(state))
    rng = np.random.default_rng(5)
    for tags in (NO_TAGS, frozenset({"memory"}), frozenset({"slide"}), frozenset({"swap"})):
        matching = {move for move in offered if tags <= move.tags}
        for _ in range(30):
            move = space.propose(state, rng, tags)
            assert (move in matching) if matching else (move is None)


def test_apply_does_not_change_the_old_state() -> None:
    space = _space(SMALL_KERNEL)
    state, _ = _random_walk(space, 10, seed=2)
    before = space.dump(state)
    for move in space.moves(state):
        after = space.apply(state, move)
        assert space.key(after) != space.key(state) or not _changes(state, after)
        assert space.dump(state) == before
    with pytest.raises(ValueError, match="read-only"):
        state.stall[0] = 3


def _changes(state: Schedule, after: Schedule) -> bool:
    pairs = zip(state.arrays(), after.arrays(), strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs)


def test_swapping_twice_restores_the_original_cubin() -> None:
    space = _space("softmax.sm_90")
    start = space.start()
    swaps = 0
    for move in space.moves(start):
        if not isinstance(move, Swap):
            continue
        at = int(np.flatnonzero(start.order == move.index)[0])
        neighbour = int(start.order[at + 1])
        if any(start.reuse[i] for i in (move.index, neighbour, int(start.order[at - 1]))):
            continue
        swapped = space.apply(start, move)
        assert space.impose(swapped).to_cubin() != space.program.cubin.data
        restored = space.apply(swapped, Swap(neighbour, NO_TAGS))
        assert restored == start
        assert space.impose(restored).to_cubin() == space.program.cubin.data
        swaps += 1
        if swaps == 20:
            break
    assert swaps


@pytest.mark.parametrize("name", KERNELS)
def test_the_patcher_gives_the_bytes_of_the_program(name: str) -> None:
    space = _space(name)
    patcher = Patcher(space.program, space.function)
    state, rng = space.start(), np.random.default_rng(5)
    assert patcher.patch(state) == space.program.cubin.data
    for _ in range(60):
        move = space.propose(state, rng)
        assert move is not None
        state = space.apply(state, move)
    assert patcher.patch(state) == space.impose(state).to_cubin()
