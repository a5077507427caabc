"""The lexer loses no byte and names the line of what it cannot read."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.ptx.errors import BadPtx
from nostall.ptx.text import TokenKind, code_tokens, tokenize
from tests.unit.ptx.ptx_texts import NAMES, corpus


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_compiler_output_are_its_text(name: str) -> None:
    text = corpus(name)
    tokens = tokenize(text)
    assert "".join(token.text for token in tokens) == text
    assert all(a.end == b.start for a, b in pairwise(tokens))


PIECES = (
    *("add.s32", " ", "\n", "\r\n", "%r1", ",", ";", "// c {\n", "/* } \n */", '"a;{b"', "{", "}"),
    *("@!%p", "0f3F800000", "-1", "L1::evict", "a:", "[%rd1+-4]", "|", "_", "\t", "// \u00e9\n"),
)


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_tokens_of_any_text_are_the_text(text: str) -> None:
    try:
        tokens = tokenize(text)
    except BadPtx:
        return
    assert "".join(token.text for token in tokens) == text


def test_comments_and_strings_hide_code() -> None:
    text = 'add /* ; } */ a; // "x" ;\n.pragma "no // comment; {";'
    words = [token.text for token in code_tokens(tokenize(text))]
    assert words == ["add", "a", ";", ".pragma", '"no // comment; {"', ";"]


def test_words_keep_their_qualifiers() -> None:
    text = "tcgen05.wait::ld.sync.aligned; L:ld.global.L2::128B.v2.u32 {%r1,_}, [%rd1+-0x4];"
    words = [t.text for t in code_tokens(tokenize(text)) if t.kind is TokenKind.WORD]
    assert [token.text for token in tokenize(".reg.b32")] == [".reg", ".b32"]
    expected = "tcgen05.wait::ld.sync.aligned L ld.global.L2::128B.v2.u32 %r1 _ %rd1 0x4"
    assert words == expected.split()


@pytest.mark.parametrize(
    ("text", "line", "problem"),
    [
        ("add;\n\x00", 2, "x00"),
        ("a\n\n/* open", 3, "/\\*"),
        ('.file 1 "a\n', 1, "quote"),
        ("\n#define X 1\n", 2, "preprocessor"),
        ("é", 1, "'é'"),
    ],
)
def test_the_error_names_line_and_problem(text: str, line: int, problem: str) -> None:
    with pytest.raises(BadPtx, match=rf"line {line}: .*{problem}"):
        tokenize(text)


def test_line_markers_are_comments() -> None:
    assert code_tokens(tokenize('# 1 "a.ptx"\n#line 3\nret;'))[0].text == "ret"
