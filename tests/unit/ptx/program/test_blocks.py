"""Borders of blocks, what stays between units, and scopes as units."""

from __future__ import annotations

import pytest

from nostall.ptx.program.blocks import Block
from nostall.ptx.program.module import Function
from nostall.ptx.program.resources import BARRIER
from tests.unit.ptx.ptx_texts import corpus, corpus_module, module


def kernel(body: str) -> Function:
    (found,) = module(body).kernels
    return found


def shape(body: str) -> list[list[str]]:
    """Per block, the text of each unit."""
    found = module(body)
    blocks = found.kernels[0].blocks
    return [[found.text[unit.start : unit.end] for unit in block.units] for block in blocks]


A, B, C = "mov.b32 %r1, 1;", "mov.b32 %r2, 2;", "mov.b32 %r3, 3;"


@pytest.mark.parametrize(
    ("body", "blocks"),
    [
        (f"{A}\n$L__tmp1:\n.loc 1 2 3\n// comment\n{B}", [[A, B]]),
        (f"{A}\nL:\n{B}\n@%p1 bra L;\n{C}", [[A], [B], [C]]),
        (f"{A}\n@%p1 ret;\n{B}\nexit;\n{C}", [[A], [B], [C]]),
        (f"{A}\n.local .b8 x[4];\n{B}", [[A, B]]),
        (f"{A}\n@%p1 trap;\n{B}", [[A, "@%p1 trap;", B]]),
        (f"{A}\nL1:\n{B}\nts: .branchtargets L1;\nbrx.idx %r1, ts;\n{C}", [[A], [B], [C]]),
        (f"{A}\nP: .callprototype _ ();\n{B}", [[A, B]]),
        (f'{A}\n.pragma "nounroll";\n{B}', [[A, B]]),
        (f'{A}\n.pragma "new 1";\n{B}\n{C}', [[A], [B], [C]]),
        (
            f'{A}\n.pragma "used_bytes_mask 0xff";\n{B}\n{C}',
            [[A, f'.pragma "used_bytes_mask 0xff";\n{B}', C]],
        ),
        (f'{A}\n.pragma "used_bytes_mask 1";\nX:\n{B}\n{C}', [[A], [B], [C]]),
        (f'{A}\n.pragma "used_bytes_mask 1";\nbra X;\nX:\n{B}\n{C}', [[A], [B, C]]),
    ],
)
def test_borders(body: str, blocks: list[list[str]]) -> None:
    assert shape(body) == blocks


def test_a_unit_has_the_comment_that_ends_its_line() -> None:
    body = f"{A} // one\n{B} /* two */\n{C} /* three */ {A}\n{B} /* four\n*/ {C}"
    assert shape(body) == [[f"{A} // one", f"{B} /* two */", C, A, B, C]]


def test_a_closed_scope_is_a_unit_with_blocks_of_its_own() -> None:
    scope = "{ .reg .b32 t; mov.b32 t, 1; add.s32 %r2, %r2, t; }"
    inner = ["mov.b32 t, 1;", "add.s32 %r2, %r2, t;"]
    assert shape(f"{A}\n{scope} // end\n{C}") == [[A, f"{scope} // end", C], inner]


def test_a_scope_with_a_loop_inside_is_a_unit_that_is_a_barrier() -> None:
    body = f"{A} {{ W: mbarrier.try_wait.shared.b64 %p1, [%r5], %rd1; @%p1 bra D; bra W; D: }} {B}"
    outer, inner = kernel(body).blocks
    assert len(outer) == 3
    assert len(inner) == 1
    assert {*BARRIER.writes, "%p1"} <= outer.units[1].writes
    assert "%p1" in outer.units[1].reads
    assert (outer.depth, inner.depth) == (0, 1)


@pytest.mark.parametrize("leaving", ["@%p1 bra L;", "ret;", "@%p1 exit;", "brx.idx %r1, ts;"])
def test_a_scope_that_control_leaves_splits_blocks(leaving: str) -> None:
    body = f"{A}\n{{\n{B}\n{leaving}\n{C}\n}}\n{A}\nL:\nts: .branchtargets L;\n{B}"
    assert shape(body) == [[A], [B], [C], [A], [B]]


def test_a_scope_is_closed_if_another_one_uses_its_labels_names() -> None:
    wait = "{ W: add.s32 %r5, %r5, 1; @%p1 bra W; }"
    assert shape(f"{wait}\n{wait}")[0] == [wait, wait]


def test_users_of_a_name_stay_behind_its_declaration() -> None:
    block = kernel(f"{A}\n.reg .b32 late, %q<3>;\n{B}\nmov.b32 late, 1;\nadd.s32 %r9, %q2, %q3;\n")
    (outer,) = block.blocks
    assert outer.earliest == (0, 0, 1, 1)
    vector = kernel(f"{A}\n.reg .v2 .f32 v;\n{B}\nmov.f32 v.x, 0f00000000;").blocks[0]
    assert vector.earliest == (0, 0, 1)


def test_a_declaration_that_hides_a_name_splits_the_block() -> None:
    body = ".reg .b32 x;\n{\nmov.b32 x, 1;\n.reg .b32 x;\nmov.b32 x, 2;\n}"
    outer, first, second = kernel(body).blocks
    assert [len(block) for block in (outer, first, second)] == [1, 1, 1]
    assert outer.units[0].writes == {"x", "x@1"}


def test_loops_nest_by_their_backward_branches() -> None:
    body = f"{A} O: {A} I: {B} @%p1 bra I; {C} @%p2 bra O; {A} @%p3 bra E; {B} E: {C}"
    assert [block.depth for block in kernel(body).blocks] == [0, 1, 2, 1, 0, 0, 0]
    assert kernel(f"L: {A} ts: .branchtargets L, M; brx.idx %r1, ts; M: {B}").blocks[0].depth == 1


def test_debug_labels_do_not_cut_the_blocks_of_triton() -> None:
    text = corpus("fused_attention.sm_90")
    assert text.count("$L__tmp") > 20
    (attention,) = corpus_module("fused_attention.sm_90").kernels
    sizes = [len(block) for block in attention.outer_blocks]
    assert len(sizes) == 4
    assert max(sizes) > 300


def test_every_instruction_but_terminators_is_in_a_block() -> None:
    for name in ("nvcc-hopper.sm_90a", "nvcc-calls.sm_80", "prints.sm_80"):
        for function in corpus_module(name).functions:
            inside = [i.index for b in function.outer_blocks for i in b.instructions]
            ends = [i.index for i in function.instructions if i.ends_block]
            in_scopes = set(inside) & set(ends)
            assert sorted({*inside, *ends}) == list(range(len(function.instructions)))
            assert len(inside) == len(set(inside))
            assert all(i.base == "bra" for i in function.instructions if i.index in in_scopes)


def test_blocks_of_a_scope_follow_their_block() -> None:
    blocks: tuple[Block, ...] = kernel(f"{{ {A} }} {B} L: {{ {C} }} bra L;").blocks
    assert [len(block) for block in blocks] == [2, 1, 1, 1]
