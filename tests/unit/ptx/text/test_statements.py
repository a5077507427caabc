"""Statements partition the code of a file, and each kind is recognised."""

from __future__ import annotations

import pytest

from nostall.ptx.errors import BadPtx
from nostall.ptx.text import StatementKind, code_tokens, split, tokenize
from tests.unit.ptx.ptx_texts import NAMES, corpus, ptx


@pytest.mark.parametrize("name", NAMES)
def test_each_code_token_is_in_one_statement(name: str) -> None:
    text = corpus(name)
    in_statements = [token for statement in split(text) for token in statement.tokens]
    assert in_statements == code_tokens(tokenize(text))


def kinds(body: str) -> list[tuple[str, str]]:
    """(kind, text) of the statements of a kernel body, without its registers and its return."""
    text = ptx(body)
    start = text.index(body)
    statements = [s for s in split(text) if start <= s.start < start + len(body)]
    return [(s.kind.value, text[s.start : s.end]) for s in statements]


def test_statements_end_where_ptx_says() -> None:
    body = (
        ".loc 1 2 3, function_name $L+4, inlined_at 1 5 6 L: @!%p1 mov.b32\n{%r1,\n%r2}, %r3 ; {"
        '.reg .b32 t;} .pragma "nounroll";;P: .callprototype (.param .b32 _) _ ();'
    )
    assert kinds(body) == [
        ("directive", ".loc 1 2 3, function_name $L+4, inlined_at 1 5 6"),
        ("label", "L:"),
        ("instruction", "@!%p1 mov.b32\n{%r1,\n%r2}, %r3 ;"),
        ("open", "{"),
        ("directive", ".reg .b32 t;"),
        ("close", "}"),
        ("directive", '.pragma "nounroll";'),
        ("empty", ";"),
        ("label", "P:"),
        ("directive", ".callprototype (.param .b32 _) _ ();"),
    ]


def test_everything_may_stand_on_one_line() -> None:
    text = (
        '.version 8.0 .target sm_80, debug .address_size 64 .file 1 "a", 1, 2 '
        ".global .b32 t[2] = {1, 2}; .visible .func (.param .b32 r) f(.param .b32 x); "
        '.entry k() .maxntid 1, 2 .pragma "nounroll"; { ret; } .section .debug_x { .b8 1 L: { } }'
        "@@DWARF .byte 1"
    )
    found = split(text)
    assert [s.kind for s in found] == [StatementKind.DIRECTIVE] * 5 + [
        StatementKind.FUNCTION,
        StatementKind.FUNCTION,
        StatementKind.OPEN,
        StatementKind.INSTRUCTION,
        StatementKind.CLOSE,
        StatementKind.DIRECTIVE,
        StatementKind.DIRECTIVE,
    ]
    assert [s.is_prototype for s in found[5:7]] == [True, False]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("int main() {}", "'int' outside of a function is no directive"),
        (".version 8.0\n.entry k()\n{ ret; ", "line 3: an opening brace without"),
        (".version 8.0\n}", "line 2: a closing brace without"),
        (".entry k() { ret }", "line 1: an instruction without a semicolon"),
        (".entry k()", "a function without a body"),
        (".global .b32 x", "without a semicolon"),
        (".section .debug_x {", "a section without its braces"),
        (".version 8.0\n{ }", "line 2: a brace that opens no function body"),
        (".version", "a directive without its operands"),
        (".entry k()" + "{" * 200, "too many braces inside each other"),
        (".entry k() { , }", "',' begins no statement"),
    ],
)
def test_what_is_no_ptx_is_refused_with_its_line(text: str, problem: str) -> None:
    with pytest.raises(BadPtx, match=problem):
        split(text)
