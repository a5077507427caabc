"""The space of a PTX kernel keeps its contract, and its states keep the program."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from nostall.core.errors import BadRun, IllegalMove
from nostall.ptx.program.module import Module, parse
from nostall.ptx.schedule.hints import HINTS
from nostall.ptx.schedule.levers import NO_LEVERS, Levers
from nostall.ptx.schedule.moves import SetHint, SetLever, Shift
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState
from nostall.testing import check_space
from tests.unit.ptx.ptx_texts import FEW, NAMES, corpus_module, module

SMALL = """
	ld.global.b32 %r1, [%rd1];
	ld.global.b32 %r2, [%rd2];
	add.s32 %r3, %r1, %r2;
	.reg .b32 late;
	mov.b32 late, 7;
	st.global.b32 [%rd3], %r3;
	bar.sync 0;
	shfl.sync.bfly.b32 %r4, late, 1, 31, -1;
"""


def space(body: str = SMALL, levers: Levers = NO_LEVERS) -> PtxSpace:
    return PtxSpace(module(body), levers=levers)


def statements(found: Module) -> list[Counter[str]]:
    """Per function, the statements of its blocks; per block, so that borders count."""
    return [
        Counter(re.sub(r"\s+", " ", found.text[i.start : i.end]) for i in block.instructions)
        for function in found.functions
        for block in function.outer_blocks
    ]


def test_the_contract_holds_for_a_small_kernel() -> None:
    levers = Levers(("", "cutlass_k"), (None, 64), ((), ("-O1",)), ("", "13.0.88"), HINTS[:2])
    check_space(space(levers=levers), steps=30)


def test_the_contract_holds_for_a_kernel_of_triton() -> None:
    found = corpus_module("inline_assembly.sm_90")
    levers = Levers(("", "cutlass_inline_assembly"), (None, 32, 255), ((), ("--opt-level=1",)))
    check_space(PtxSpace(found, levers=levers), steps=2)


@pytest.mark.parametrize("name", NAMES)
def test_the_start_state_is_the_text(name: str) -> None:
    found = corpus_module(name)
    for kernel in found.kernels:
        own = PtxSpace(found, kernel.name)
        assert own.text(own.start()) == found.text


@pytest.mark.parametrize("name", FEW)
def test_random_states_keep_statements_and_borders(name: str) -> None:
    found = corpus_module(name)
    own = PtxSpace(found, found.kernels[0].name)
    rng = np.random.default_rng(1)
    state = own.start()
    for sigma in (2.0, 80.0):
        state = own.reorder(state, rng, sigma)
        for _ in range(10):
            move = own.propose(state, rng)
            if move is not None:
                state = own.apply(state, move)
        text = own.text(state)
        assert statements(parse(text)) == statements(found)
        assert between_units(parse(text)) == between_units(found)
        assert own.load(own.dump(state)) == state
        assert all(
            own.graphs[number].is_legal(own.order(state, number))
            for number in range(len(own.blocks))
        )
    assert state != own.start()


def between_units(found: Module) -> list[str]:
    """Words of the text outside of units: directives, labels, terminators, comments."""
    units = [u for f in found.functions for block in f.outer_blocks for u in block.units]
    starts = [0, *(unit.end for unit in units)]
    ends = [*(unit.start for unit in units), len(found.text)]
    pieces = (found.text[start:end] for start, end in zip(starts, ends, strict=True))
    return " ".join(pieces).split()


def test_a_walk_of_shifts_reaches_every_legal_order() -> None:
    own = space("mov.b32 %r1, 1; mov.b32 %r2, 2; add.s32 %r3, %r1, 1; mov.b32 %r4, %r3;")
    seen: set[PtxState] = set()
    todo = [own.start()]
    while todo:
        state = todo.pop()
        if state not in seen:
            seen.add(state)
            todo += [own.apply(state, move) for move in own.moves(state)]
    assert {own.order(state, 0) for state in seen} == {
        (1, 0, 2, 3),
        (0, 1, 2, 3),
        (0, 2, 1, 3),
        (0, 2, 3, 1),
    }
    drawn = {own.reorder(own.start(), np.random.default_rng(n), 5.0) for n in range(200)}
    assert drawn == seen


def test_reorder_keeps_declarations_before_their_users() -> None:
    own = space()
    for seed in range(50):
        text = own.text(own.reorder(own.start(), np.random.default_rng(seed), 10.0))
        assert text.index(".reg .b32 late;") < text.index("mov.b32 late")
        assert PtxSpace(parse(text)).blocks[0].earliest.count(0) < len(own.blocks[0])


def test_reorder_takes_the_named_blocks_only_and_follows_its_seed() -> None:
    body = "mov.b32 %r1, 1; mov.b32 %r2, 2; mov.b32 %r3, 3; "
    own = space(body * 2 + "L:" + body.replace("%r", "%r1") + "@%p1 bra L;")
    state = own.reorder(own.start(), np.random.default_rng(0), 20.0, blocks=[1])
    assert state.orders[0] == ()
    assert state.orders[1] != ()
    assert state == own.reorder(own.start(), np.random.default_rng(0), 20.0, blocks=[1])
    assert own.reorder(state, np.random.default_rng(0), 0.0) == state


def test_tags_tell_memory_and_convergence() -> None:
    own = space(
        "ld.global.b32 %r1, [%rd1]; mov.b32 %r2, 1; shfl.sync.bfly.b32 %r3, %r4, 1, 31, -1;"
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r5}, [%r6];"
    )
    tags = {move.unit: move.tags for move in own.moves(PtxState()) if isinstance(move, Shift)}
    assert tags == {
        0: {"order", "memory"},
        1: {"order"},
        2: {"order", "convergent"},
        3: {"order", "memory", "convergent"},
    }


@pytest.mark.parametrize(
    "move",
    [
        Shift(0, 2, -1, frozenset(("order",))),
        Shift(0, 3, -1, frozenset(("order",))),
        Shift(0, 0, 99, frozenset(("order", "memory"))),
        SetLever("max_registers", 63, frozenset(("lever", "max_registers"))),
        SetLever("max_registers", None, frozenset(("lever", "max_registers"))),
        SetHint(0, "L2::64B", frozenset(("lever", "hint"))),
    ],
)
def test_illegal_moves_are_refused(move: Shift | SetLever | SetHint) -> None:
    with pytest.raises(IllegalMove, match="illegal"):
        space().apply(PtxState(), move)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        (PtxState(orders=((), ())).dump(), "has 2 blocks, this kernel has 1"),
        (PtxState(orders=((2, 1, 0, 3, 4, 5, 6),)).dump(), "breaks a dependence"),
        (PtxState(orders=((0, 1),)).dump(), "breaks a dependence"),
    ],
)
def test_damaged_states_are_refused(text: str, problem: str) -> None:
    with pytest.raises(BadRun, match=problem):
        space().load(text)


def test_functions_that_the_kernel_may_call_belong_to_its_space() -> None:
    found = corpus_module("nvcc-calls.sm_80")
    own = PtxSpace(found, found.kernels[0].name)
    names = {function.name for function in own.functions}
    assert "_Z3addff" in names
    assert not names & {kernel.name for kernel in found.kernels[1:]}
