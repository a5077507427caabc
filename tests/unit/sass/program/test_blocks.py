"""Basic blocks and edges of kernels with loops, calls, jump tables and convergence."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from tests.corpus import catalogue

from nostall.sass import Function, Program, verify
from nostall.sass.program.blocks import build_blocks
from nostall.sass.schedule import ScheduleSpace
from nostall.sass.schedule.moves import ScheduleMove

Golden = list[tuple[int, int, tuple[int, ...]]]
"""(start, end, successors) of each block."""

LOOP_IN_LOOP: Golden = [
    (0, 17, (1, 10)),
    (17, 18, (2,)),
    (18, 22, (3, 8)),
    (22, 25, (4,)),
    (25, 32, (4, 5)),
    (32, 33, (6,)),  # BSYNC B2
    (33, 35, (7,)),  # @!P0 BREAK B1
    (35, 36, (8, 11)),
    (36, 37, (9,)),  # BSYNC B1
    (37, 41, (2, 10)),
    (41, 42, (11,)),
    (42, 43, (12,)),  # BSYNC B0
    (43, 49, ()),  # EXIT
    (49, 50, (13,)),  # the endless branch after the code
    (50, 64, ()),
]
"""uneven_loops of warps.sm_90.cubin."""

SPIN: Golden = [
    (0, 10, (1,)),
    (10, 16, (2, 3)),
    (16, 26, (3,)),
    (26, 27, (4,)),  # BSYNC B0
    (27, 29, (1, 5)),
    (29, 30, ()),
    (30, 31, (6,)),
    (31, 40, ()),
]
"""spin_lock of atomics.sm_90.cubin."""

CALLS: Golden = [
    (0, 9, (1,)),
    (9, 20, (2, 8)),  # CALL horner
    (20, 26, (3, 8)),  # CALL horner
    (26, 31, (4, 6)),
    (31, 33, (5, 21)),  # CALL swap_pair
    (33, 34, (6,)),
    (34, 35, (7,)),
    (35, 41, ()),
    (41, 44, (9, 20)),  # horner
]
"""The first blocks of noinline_calls of calls.sm_90.cubin."""


@lru_cache
def load_function(file: str, name: str) -> Function:
    data = (catalogue.NVCC / f"{file}.cubin").read_bytes()
    return Program.from_cubin(data).function(name)


@pytest.mark.parametrize(
    ("file", "name", "golden"),
    [
        ("warps.sm_90", "uneven_loops", LOOP_IN_LOOP),
        ("atomics.sm_90", "spin_lock", SPIN),
        ("calls.sm_90", "noinline_calls", CALLS),
    ],
)
def test_blocks_of_small_kernels(file: str, name: str, golden: Golden) -> None:
    blocks = load_function(file, name).blocks
    assert [(b.start, b.end, b.succ) for b in blocks[: len(golden)]] == golden


def test_a_subroutine_returns_after_each_of_its_calls() -> None:
    function = load_function("calls.sm_90", "noinline_calls")
    returns = {
        block.subroutine: block.succ
        for block in function.blocks
        if function.instructions[block.end - 1].base == "RET"
    }
    assert returns == {1: (2, 3), 2: (5,)}
    assert [b.is_entry for b in function.blocks].count(True) == 3  # the kernel and two subroutines


def test_an_indirect_branch_reaches_the_targets_of_its_own_record() -> None:
    """The four branches of the kernel share one target at most; together they have all targets."""
    function = load_function("calls.sm_90", "jump_table")
    blocks = [b for b in function.blocks if function.instructions[b.end - 1].base == "BRX"]
    reached = [{function.blocks[s].start for s in block.succ} for block in blocks]
    recorded = {r.offset // 16 for r in function.text.records if r.is_branch_target}
    assert set().union(*reached) == recorded
    assert [len(starts) for starts in reached] == [4, 4, 4, 3]
    assert reached[0] & reached[1] == {180}
    assert not reached[2] & (reached[0] | reached[1] | reached[3])


def test_an_indirect_branch_without_a_record_reaches_all_targets() -> None:
    function = load_function("calls.sm_90", "jump_table")
    anonymous = [
        replace(i, text=i.text.partition("(*")[0]) if i.base == "BRX" else i
        for i in function.instructions
    ]
    recorded = [r.offset // 16 for r in function.text.records if r.is_branch_target]
    blocks = build_blocks(anonymous, {}, (), recorded, is_kernel=True)
    for block in blocks:
        if anonymous[block.end - 1].base == "BRX":
            assert {blocks[s].start for s in block.succ} == set(recorded)


def test_a_bsync_continues_at_the_target_of_its_bssy() -> None:
    """In one kernel the target follows the BSYNC, in the other it is elsewhere."""
    for file, name in (("warps.sm_90", "uneven_loops"), ("warps.sm_75", "sync_in_branches")):
        function = load_function(file, name)
        labels = {i.operands[0] for i in function.instructions if i.base == "BSSY"}
        syncs = [b for b in function.blocks if function.instructions[b.end - 1].base == "BSYNC"]
        assert syncs and labels
        for block in syncs:
            assert function.instructions[block.end - 1].operands[0] in labels
            assert block.succ


@pytest.mark.parametrize(
    "file", ["warps.sm_90", "calls.sm_80", "algorithms.sm_86", "hopper.sm_90a"]
)
def test_blocks_and_edges_are_consistent(file: str) -> None:
    data = (catalogue.NVCC / f"{file}.cubin").read_bytes()
    for function in Program.from_cubin(data).functions:
        blocks = function.blocks
        assert blocks[0].start == 0 and blocks[-1].end == len(function.instructions)
        assert blocks[0].is_entry
        for number, block in enumerate(blocks):
            assert len(block) > 0
            for successor in block.succ:
                assert number in blocks[successor].pred
            for predecessor in block.pred:
                assert number in blocks[predecessor].succ
            inner = function.instructions[block.start : block.end - 1]
            assert not [i for i in inner if i.base in ("BRA", "EXIT", "RET", "BRX", "CALL")]
            last = function.instructions[block.end - 1]
            if last.base == "EXIT" and not last.is_guarded:
                assert block.succ == ()
        assert function.block_numbers == tuple(
            n for n, b in enumerate(blocks) for _ in range(len(b))
        )


def test_blocks_that_adjoin_unknown_code() -> None:
    """These are a call by pointer, the block after it, and subroutines with unknown callers.

    A subroutine whose callers are all known is none of them.
    """
    function = load_function("calls.sm_90", "function_pointers")
    call = next(i.index for i in function.instructions if i.base == "CALL")
    after = [
        b.adjoins_unknown_code
        for b in function.blocks
        if call in range(b.start, b.end) or b.start == call + 1
    ]
    assert after == [True, True]
    ends = {function.instructions[b.end - 1].base: b.adjoins_unknown_code for b in function.blocks}
    assert ends["RET"]
    assert not any(
        b.adjoins_unknown_code for b in load_function("calls.sm_90", "noinline_calls").blocks
    )
    assert load_function("memory.sm_90", "prints").frozen == frozenset(range(15, 27))


def test_instructions_that_adjoin_unknown_code_are_frozen() -> None:
    data = (catalogue.NVCC / "memory.sm_90.cubin").read_bytes()
    program = Program.from_cubin(data)
    prints = program.function("prints")
    assert not prints.frozen & {m.index for m in _moves(program, prints)}
    at = next(i for i in sorted(prints.frozen) if not prints.instructions[i].is_barrier)
    longer = replace(prints.instructions[at].control, stall=9)
    changed = list(prints.instructions)
    changed[at] = changed[at].with_control(longer)
    verdict = verify(data, program.with_function(prints.reordered(changed)).to_cubin())
    assert [f.kind for f in verdict.findings] == ["open-changed"]


def _moves(program: Program, function: Function) -> list[ScheduleMove]:
    space = ScheduleSpace(program, function)
    return list(space.moves(space.start()))
