"""Lossless lexer for PTX: the texts of the tokens, joined, are the text of the file."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from nostall.ptx.errors import bad_ptx


class TokenKind(StrEnum):
    """Kinds of tokens."""

    SPACE = "space"
    COMMENT = "comment"
    """A line comment, a block comment, or a line marker of a preprocessor (``# 1 "file"``)."""
    DWARF = "dwarf"
    """A line ``@@DWARF …`` of PTX before version 2.0."""
    STRING = "string"
    WORD = "word"
    """An identifier, register, number or opcode with its dots and ``::``; or a directive, which
    ends before the next dot: ``.reg.b32`` is two words."""
    MARK = "mark"
    """One character of punctuation."""


class Token(NamedTuple):
    """One token: its text, and the offset and the line of its first character."""

    kind: TokenKind
    text: str
    start: int
    line: int
    """Counted from 1."""

    @property
    def end(self) -> int:
        """Offset of the first character after the token."""
        return self.start + len(self.text)


_PATTERN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<comment>//[^\r\n]* | /\*.*?\*/ | ^[ \t]*\#[ \t]*(?:line[ \t]+)?\d[^\r\n]*)
    | (?P<dwarf>@@DWARF[^\r\n]*)
    | (?P<string>"(?:[^"\\\r\n]|\\.)*")
    | (?P<word>\.(?:[A-Za-z0-9_$%]|::)+ | (?:[A-Za-z0-9_$%.]|::)+)
    | (?P<mark>[][{}()<>,;:@!|+\-*/=~&^?])
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_TRIVIA = (TokenKind.SPACE, TokenKind.COMMENT)
_CAUSES = {
    '"': ("a string without a closing quote", "close the string on its line"),
    "#": (
        "a preprocessor directive",
        'only line markers such as # 1 "file" are allowed; preprocess the file first',
    ),
}


def tokenize(text: str) -> list[Token]:
    """All tokens of ``text`` in their order, white space and comments included.

    Raises :class:`~nostall.ptx.errors.BadPtx` at the first character that begins no token.
    """
    tokens: list[Token] = []
    position = 0
    line = 1
    kinds = {kind.value: kind for kind in TokenKind}
    while position < len(text):
        match = _PATTERN.match(text, position)
        if match is None or (text.startswith("/*", position) and match.lastgroup == "mark"):
            problem, advice = _cause(text, position)
            raise bad_ptx(line, problem, advice)
        assert match.lastgroup is not None
        token = Token(kinds[match.lastgroup], match.group(), position, line)
        tokens.append(token)
        position = match.end()
        line += token.text.count("\n")
    return tokens


def code_tokens(tokens: list[Token]) -> list[Token]:
    """The tokens without white space and comments."""
    return [token for token in tokens if token.kind not in _TRIVIA]


def _cause(text: str, position: int) -> tuple[str, str]:
    """Problem and advice for the character that begins no token."""
    character = text[position]
    if text.startswith("/*", position):
        return "a comment /* without its */", "close the comment"
    return _CAUSES.get(
        character,
        (
            f"the character {character!r} begins no PTX token",
            "give a PTX text, such as a .ptx file",
        ),
    )
