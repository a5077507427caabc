"""The text of states: moved statements, names, register budgets and hints."""

from __future__ import annotations

import pytest

from nostall.core.errors import BadInput
from nostall.ptx.program.module import parse
from nostall.ptx.schedule.hints import allowed_hints
from nostall.ptx.schedule.levers import Levers
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState
from tests.unit.ptx.ptx_texts import corpus, module, ptx


def moved(body: str, *orders: tuple[int, ...]) -> str:
    """The text of ``body`` with its blocks in other orders."""
    own = PtxSpace(module(body))
    text = own.text(PtxState(orders=orders))
    before, after = ptx("BODY").split("BODY")
    assert text.startswith(before)
    assert text.endswith(after)
    return text[len(before) : len(text) - len(after)]


A, B, C = "mov.b32 %r1, 1;", "mov.b32 %r2, 2;", "mov.b32 %r3, 3;"


@pytest.mark.parametrize(
    ("body", "order", "expected"),
    [
        (f"\t{A} // a\n\t{B}\n", (1, 0), f"\t{B}\n\t{A} // a\n"),
        (f"\t{A}\n.loc 1 2 3\n\t{B}\n", (1, 0), f"\t{B}\n.loc 1 2 3\n\t{A}\n"),
        (f"{A} {B}", (1, 0), f"{B}\n \n\t{A}"),
        (f"L: {A} // a\n{B}", (1, 0), f"L: \n\t{B}\n{A} // a"),
        (f"{A} /* x */ {B} // b\n{C}", (1, 0, 2), f"{B} // b\n /* x */ \n\t{A}\n{C}"),
        ("mov.b32 %r1,\n 1; // a\n" + B, (1, 0), f"{B}\nmov.b32 %r1,\n 1; // a"),
        (f"{A} // a\r\n{B}\r\n", (1, 0), f"{B}\r\n{A} // a\r\n"),
    ],
)  # fmt: skip
def test_a_moved_statement_takes_a_line_with_its_comment(
    body: str, order: tuple[int, ...], expected: str
) -> None:
    assert moved(body, order) == expected


def test_scopes_move_with_their_content_in_another_order() -> None:
    scope = f"{{ .reg .b32 t;\n{A}\nmov.b32 t, 1;\n}} // end"
    swapped = f"{{ .reg .b32 t;\nmov.b32 t, 1;\n{A}\n}} // end"
    assert moved(f"{scope}\n{B}\n", (1, 0), (1, 0)) == f"{B}\n{swapped}\n"


def test_the_new_name_replaces_the_kernel_and_nothing_else() -> None:
    text = ptx(
        '.loc 1 2 3 // k\n.pragma "k";\nmov.u64 %rd1, k;\nmov.u64 %rd2, k_param;',
        outer=".entry k(.param .u64 a, .param .u64 b);\n.func f() { .reg .b32 k; mov.b32 k, 1; }",
    )
    renamed = PtxSpace(parse(text)).text(PtxState(kernel_name="cutlass_k"))
    expected = text
    for part in (".entry k(", "%rd1, k;"):
        assert part in text
        expected = expected.replace(part, part.replace("k", "cutlass_k"))
    assert renamed == expected
    (kernel,) = parse(renamed).kernels
    assert kernel.name == "cutlass_k"


def test_parameters_keep_their_names() -> None:
    text = corpus("rmsnorm-512x128.sm_90")
    renamed = PtxSpace(parse(text)).text(PtxState(kernel_name="cutlass_rmsnorm"))
    assert "rmsnorm_param_0" in renamed
    differing = [
        (a, b) for a, b in zip(text.splitlines(), renamed.splitlines(), strict=True) if a != b
    ]
    assert [a.strip() for a, _ in differing] == [".visible .entry rmsnorm("]


@pytest.mark.parametrize("name", ["a", "1k", "k-2", "", " ", "k", "é"])
def test_names_that_cannot_be_given(name: str) -> None:
    own = PtxSpace(module(""))
    if name in ("", "k"):
        assert own.text(PtxState(kernel_name=name)) == own.module.text
    else:
        with pytest.raises(BadInput, match="kernel name"):
            own.text(PtxState(kernel_name=name))


def test_a_register_budget_is_a_directive() -> None:
    own = PtxSpace(module(""))
    head = parse(own.text(PtxState(max_registers=64))).kernels[0].head
    assert [t.text for t in head.tokens[-2:]] == [".maxnreg", "64"]
    limited = own.text(PtxState(max_registers=64))
    again = PtxSpace(parse(limited)).text(PtxState(max_registers=128))
    assert again == limited.replace(".maxnreg 64", ".maxnreg 128")
    with pytest.raises(BadInput, match="300 registers"):
        own.text(PtxState(max_registers=300))


def test_a_kernel_that_exchanges_registers_keeps_its_budget() -> None:
    levers = Levers(max_registers=(None, 64))
    own = PtxSpace(module("setmaxnreg.dec.sync.aligned.u32 24;"), levers=levers)
    assert list(own.moves(own.start())) == []
    with pytest.raises(BadInput, match="setmaxnreg"):
        own.text(PtxState(max_registers=64))


@pytest.mark.parametrize(
    ("text", "hint", "expected"),
    [
        ("ld.global.v2.b32 {%r1,%r2}, [%rd1];", "L2::128B", "ld.global.L2::128B.v2.b32"),
        ("ld.global.nc.b32 %r1, [%rd1];", "L1::no_allocate", "ld.global.nc.L1::no_allocate.b32"),
        ("@%p1 st.global.b32 [%rd1], %r1;", "L1::evict_first", "st.global.L1::evict_first.b32"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16;", "L2::64B",
         "cp.async.cg.shared.global.L2::64B"),
    ],
)  # fmt: skip
def test_hints_stand_where_the_grammar_has_them(text: str, hint: str, expected: str) -> None:
    own = PtxSpace(module(text))
    assert hint in allowed_hints(own.kernel.instructions[0])
    assert expected + " " in own.text(PtxState(hints=((0, hint),)))


@pytest.mark.parametrize(
    "text",
    [
        "ld.shared.b32 %r1, [%r2];",
        "ld.volatile.global.b32 %r1, [%rd1];",
        "ld.global.cs.b32 %r1, [%rd1];",
        "ld.global.L1::evict_last.b32 %r1, [%rd1];",
        "cp.async.wait_all;",
        "cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16;",
        "cp.async.bulk.commit_group;",
        "add.s32 %r1, %r2, %r3;",
        "trap;",
        "ld .global .b32 %r1, [%rd1];",
    ],
)
def test_other_instructions_take_no_hint(text: str) -> None:
    own = PtxSpace(module(text))
    assert allowed_hints(own.kernel.instructions[0]) == ()
    with pytest.raises(BadInput, match="cannot have the hint"):
        own.text(PtxState(hints=((0, "L2::128B"),)))


def test_a_hint_for_no_instruction_is_refused() -> None:
    with pytest.raises(BadInput, match="no instruction 9"):
        PtxSpace(module("")).text(PtxState(hints=((9, "L2::64B"),)))
