"""Functions of a module, its kernels, and texts that are no module."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core.errors import BadInput
from nostall.ptx.errors import BadPtx
from nostall.ptx.program.module import parse
from nostall.ptx.text.lexer import tokenize
from tests.unit.ptx.ptx_texts import NAMES, corpus, corpus_module, module, ptx


@pytest.mark.parametrize("name", NAMES)
def test_compiler_output_has_no_unknown_opcodes(name: str) -> None:
    found = corpus_module(name)
    assert found.kernels
    assert not found.unknown_opcodes


def test_functions_of_a_module() -> None:
    found = corpus_module("nvcc-calls.sm_80")
    names = [function.name for function in found.functions]
    assert names[:2] == ["_Z3addff", "_Z3mulff"]
    assert len(names) == len(set(names))
    assert {kernel.name for kernel in found.kernels} < set(names)
    assert found.target == "sm_80"
    assert "_Z3addff" in found.outer_words


def test_the_kernel_is_chosen_by_name() -> None:
    found = parse(ptx("").replace("\n}\n", "\n}\n.entry other() { ret; }\n"))
    assert found.kernel("other").name == "other"
    with pytest.raises(BadInput, match=r"no kernel was named .* k, other \(--kernel\)"):
        found.kernel()
    with pytest.raises(BadInput, match="no kernel 'x'"):
        found.kernel("x")
    assert module("").kernel().name == "k"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1: the text has no .version"),
        (".version 8.0\n", "no .target"),
        (".version 8.0\n.target sm_80\n.reg .b32 r;", "line 3: a register outside of functions"),
        ("\x7fELF", "begins no PTX token"),
        (ptx("@ %p1;"), r"line 1\d: a guard without"),
        (".version 8.0\n.target sm_80\n.entry () { ret; }", "line 3: a function without a name"),
        (".version 8.0\n.target sm_80\n.entry k() .maxntid 1; x", "line 3: 'x' outside"),
        (ptx("\n.reg .b32 %q<n>;"), "'n' is no number of registers"),
        (ptx("\n.reg .b32 %q<9999999999>;"), "is no number of registers"),
    ],
)
def test_texts_that_are_no_module(text: str, problem: str) -> None:
    with pytest.raises(BadPtx, match=problem):
        parse(text)


@settings(max_examples=50)
@given(st.data())
def test_damaged_ptx_is_read_or_refused(data: st.DataObject) -> None:
    tokens = tokenize(data.draw(st.sampled_from(DAMAGED)))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(tokens) - 1))
        other = data.draw(st.integers(0, len(tokens) - 1))
        tokens[at : at + data.draw(st.integers(0, 2))] = [tokens[other]]
    text = "".join(token.text for token in tokens)
    try:
        found = parse(text)
    except BadPtx:
        return
    assert found.text == text


DAMAGED = (
    corpus("inline_assembly.sm_90")[:3000],
    ptx(
        ".reg .v2 .f32 %v<3>; { .reg .b32 t; P: .callprototype (.param .b32 _) _ (); L: mov.b32 "
        't, %r1; @!%p1 bra L; } .pragma "used_bytes_mask 1"; ts: .branchtargets E; E: brx.idx %r1, '
        "ts; .loc 1 2 3, function_name E, inlined_at 1 2 3",
        outer='.file 1 "a" .section .debug_x { .b8 1 } .visible .func (.reg .b32 r) f(.param .b32 '
        "x) { ret; } .global .b32 y[2] = {1, f};",
    ),
)
