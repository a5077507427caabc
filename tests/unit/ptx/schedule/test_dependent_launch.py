"""The wait of a dependent launch stands before the first access, on every path to an exit."""

from __future__ import annotations

import numpy as np
import pytest

from nostall.core.errors import BadInput
from nostall.ptx.program.module import parse
from nostall.ptx.program.resources import MEMORY, Resource
from nostall.ptx.schedule.levers import Levers
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState
from tests.unit.ptx.ptx_texts import FEW, corpus_module, module

WAIT = "griddepcontrol.wait"
ACCESSES = MEMORY | {Resource.STABLE, Resource.FENCE}


WAITING = PtxState(dependent_launch="wait")


def opcodes(body: str, state: PtxState = WAITING) -> list[str]:
    text = PtxSpace(module(body)).text(state)
    return [i.opcode for i in parse(text).kernels[0].instructions][:-1]


PURE = "ld.param.u64 %rd1, [a]; add.s32 %r1, %r2, 1;"


@pytest.mark.parametrize(
    "access",
    [
        "ld.global.b32 %r3, [%rd1];",
        "ld.b32 %r3, [%rd1];",
        "ld.global.nc.b32 %r3, [%rd1];",
        "ld.const.b32 %r3, [%rd1];",
        "tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1,{%r1}];",
        "cp.async.ca.shared.global [%r1], [%rd1], 4;",
        "prefetch.global.L2 [%rd1];",
        "@%p1 red.global.add.u32 [%rd1], %r1;",
        "{ .param .b32 p; st.param.b32 [p], %r1; call f, (p); }",
        "frob.b32 %r1;",
        "@%p1 bra L; L:",
        "@%p1 exit;",
        "ret;",
    ],
)
def test_the_wait_stands_before_the_first_access_or_border(access: str) -> None:
    found = opcodes(f"{PURE} {access} ld.global.b32 %r9, [%rd2];")
    assert found[:3] == ["ld.param.u64", "add.s32", WAIT]


def test_the_wait_follows_the_order_of_the_state() -> None:
    body = "add.s32 %r1, %r2, 1; ld.global.b32 %r3, [%rd1]; add.s32 %r4, %r5, 1;"
    state = PtxState(orders=((0, 2, 1),), dependent_launch="wait+trigger")
    assert opcodes(body, state) == [
        *("add.s32", "add.s32", WAIT, "griddepcontrol.launch_dependents", "ld.global.b32")
    ]


def test_an_early_trigger_stands_first_and_the_wait_before_the_access() -> None:
    body = "add.s32 %r1, %r2, 1; ld.global.b32 %r3, [%rd1]; add.s32 %r4, %r5, 1;"
    trigger = "griddepcontrol.launch_dependents"
    state = PtxState(orders=((0, 2, 1),), dependent_launch="trigger+wait")
    assert opcodes(body, state) == [trigger, "add.s32", "add.s32", WAIT, "ld.global.b32"]
    early = PtxState(dependent_launch="trigger+wait")
    assert opcodes("ld.global.b32 %r3, [%rd1];", early) == [trigger, WAIT, "ld.global.b32"]
    assert opcodes("@%p1 bra L; L:", early)[:2] == [trigger, WAIT]
    assert opcodes("add.s32 %r1, %r2, 1;", early) == [trigger, "add.s32", WAIT]


def test_a_kernel_that_begins_with_a_border_waits_at_once() -> None:
    assert opcodes("@%p1 bra L; ld.global.b32 %r1, [%rd1]; L:")[0] == WAIT
    assert opcodes("L: add.s32 %r1, %r1, 1; @%p1 bra L;")[:2] == ["add.s32", WAIT]
    assert opcodes("") == [WAIT]
    empty = ".version 8.0\n.target sm_90\n.entry k() { }"
    assert WAIT in PtxSpace(parse(empty)).text(WAITING)


@pytest.mark.parametrize("name", [name for name in FEW if "sm_80" not in name])
def test_no_access_of_compiler_output_stands_before_the_wait(name: str) -> None:
    found = corpus_module(name)
    own = PtxSpace(found, found.kernels[0].name, Levers(dependent_launch=("", "wait")))
    state = own.reorder(WAITING, np.random.default_rng(0), 20.0)
    kernel = parse(own.text(state)).kernel(own.kernel.name)
    (wait,) = (i for i in kernel.instructions if i.opcode == WAIT)
    before = kernel.instructions[: wait.index]
    assert not any(ACCESSES & (i.reads | i.writes) or i.ends_block for i in before)
    assert wait.guard is None
    move = own.propose(own.start(), np.random.default_rng(0), frozenset({"dependent_launch"}))
    assert move is not None
    assert own.apply(own.start(), move) == WAITING


def test_other_kernels_get_no_wait() -> None:
    for body, target in (("", "sm_80"), (f"{WAIT};", "sm_90")):
        own = PtxSpace(module(body, target), levers=Levers(dependent_launch=("", "wait")))
        assert not list(own.moves(own.start()))
        with pytest.raises(BadInput, match=r"cannot get griddepcontrol\.wait"):
            own.text(WAITING)


def test_a_wait_of_the_program_is_passed_by_computation_only() -> None:
    own = PtxSpace(module(f"add.s32 %r1, %r2, 1; {WAIT}; ld.global.b32 %r3, [%rd1];"))
    assert [own.graphs[0].is_legal(order) for order in ((1, 0, 2), (0, 2, 1))] == [True, False]
