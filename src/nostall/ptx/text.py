"""Lossless tokens and statements of a PTX file.

Statements of a PTX file: spans of its text, each with the tokens that it consists of.

Statements do not overlap and stand in the order of the text. White space and comments are the only
characters outside of statements.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

from nostall.ptx.errors import BadPtx, bad_ptx


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


class StatementKind(StrEnum):
    """Kinds of statements."""

    DIRECTIVE = "directive"
    """A declaration or another directive, with its semicolon or braces if it has any."""
    FUNCTION = "function"
    """The head of a function without its body, or a prototype with its semicolon."""
    LABEL = "label"
    INSTRUCTION = "instruction"
    """An instruction with its guard and its semicolon."""
    OPEN = "open"
    """An opening brace: of a function body, or of a scope inside one."""
    CLOSE = "close"
    EMPTY = "empty"
    """A semicolon alone."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement of the text."""

    kind: StatementKind
    tokens: tuple[Token, ...]

    @property
    def start(self) -> int:
        """Offset of the first character."""
        return self.tokens[0].start

    @property
    def end(self) -> int:
        """Offset of the first character after the statement."""
        return self.tokens[-1].end

    @property
    def is_prototype(self) -> bool:
        """Whether this is the head of a function that has no body here."""
        if self.kind is not StatementKind.FUNCTION:
            return False
        texts = [token.text for token in self.tokens]
        return texts.count(";") > texts.count(".pragma")


def split(text: str) -> tuple[Statement, ...]:
    """The statements of ``text``.

    Raises :class:`~nostall.ptx.errors.BadPtx` if a statement has no end, a brace has no partner, or
    a word outside of functions is no directive.
    """
    return tuple(_Splitter(text).statements())


_MOST_BRACES = 100
_LINKAGE = frozenset((".visible", ".extern", ".weak", ".common"))


class _Splitter:
    """Cursor over the code tokens of a text."""

    def __init__(self, text: str) -> None:
        self._tokens = code_tokens(tokenize(text))
        self._at = 0

    def statements(self) -> list[Statement]:
        found: list[Statement] = []
        open_braces: list[Token] = []
        while self._at < len(self._tokens):
            statement = self._next(inside=bool(open_braces))
            if statement.kind is StatementKind.OPEN:
                if not open_braces and not (found and found[-1].kind is StatementKind.FUNCTION):
                    raise self._error(statement.tokens[0], "a brace that opens no function body")
                open_braces.append(statement.tokens[0])
                if len(open_braces) > _MOST_BRACES:
                    raise self._error(statement.tokens[0], "too many braces inside each other")
            elif statement.kind is StatementKind.CLOSE:
                if not open_braces:
                    raise self._error(statement.tokens[0], "a closing brace without an opening one")
                open_braces.pop()
            found.append(statement)
        if open_braces:
            raise self._error(open_braces[-1], "an opening brace without a closing one")
        return found

    def _next(self, *, inside: bool) -> Statement:
        """The statement at the cursor; ``inside`` tells whether it stands in a function body."""
        token = self._tokens[self._at]
        if token.text in _SINGLE:
            return self._take(_SINGLE[token.text], self._at + 1)
        if token.kind is TokenKind.DWARF:
            return self._take(StatementKind.DIRECTIVE, self._at + 1)
        if token.kind is TokenKind.WORD and token.text.startswith("."):
            return self._directive()
        if not inside:
            raise self._error(token, f"{token.text!r} outside of a function is no directive")
        if self._text_at(self._at + 1) == ":" and token.kind is TokenKind.WORD:
            return self._take(StatementKind.LABEL, self._at + 2)
        if token.kind is TokenKind.WORD or token.text == "@":
            self._check_guard()
            return self._take(StatementKind.INSTRUCTION, self._after_instruction())
        raise self._error(token, f"{token.text!r} begins no statement")

    def _directive(self) -> Statement:
        at = self._at
        while self._text_at(at) in _LINKAGE:
            at += 1
        word = self._text_at(at)
        if word in (".entry", ".func"):
            head = self._take(StatementKind.FUNCTION, self._after_head())
            if function_name(head) is None:
                raise self._error(head.tokens[0], "a function without a name")
            return head
        end = _ENDS.get(word, _Splitter._after_semicolon)(self)
        return self._take(StatementKind.DIRECTIVE, end)

    def _take(self, kind: StatementKind, end: int) -> Statement:
        statement = Statement(kind, tuple(self._tokens[self._at : end]))
        self._at = end
        return statement

    def _text_at(self, at: int) -> str:
        return self._tokens[at].text if at < len(self._tokens) else ""

    def _check_guard(self) -> None:
        """Check that a guard at the cursor has a predicate, and an opcode after it."""
        if self._text_at(self._at) != "@":
            return
        at = self._at + (2 if self._text_at(self._at + 1) == "!" else 1)
        kinds = [token.kind for token in self._tokens[at : at + 2]]
        if kinds != [TokenKind.WORD] * 2:
            raise self._error(self._tokens[self._at], "a guard without predicate or instruction")

    def _after_semicolon(self) -> int:
        """Index after the next semicolon."""
        for at in range(self._at, len(self._tokens)):
            if self._tokens[at].text == ";":
                return at + 1
        raise self._error(self._tokens[self._at], "a statement without a semicolon")

    def _after_instruction(self) -> int:
        """Index after the semicolon of an instruction, which may have braces of vectors."""
        depth = 0
        for at in range(self._at, len(self._tokens)):
            text = self._tokens[at].text
            if text == ";":
                return at + 1
            depth += (text == "{") - (text == "}")
            if depth < 0:
                break
        raise self._error(self._tokens[self._at], "an instruction without a semicolon")

    def _after_head(self) -> int:
        """Index after the head of a function: of its semicolon, or its body's opening brace."""
        at = self._at
        while at < len(self._tokens):
            text = self._tokens[at].text
            if text == "{":
                return at
            if text == ";":
                return at + 1
            if text == ".pragma":  # a pragma of the head has its own semicolon
                while self._text_at(at) not in (";", ""):
                    at += 1
            at += 1
        raise self._error(self._tokens[self._at], "a function without a body")

    def _after_braces(self) -> int:
        """Index after the braces that follow the directive at the cursor."""
        depth = 0
        for at in range(self._at, len(self._tokens)):
            text = self._tokens[at].text
            depth += (text == "{") - (text == "}")
            if text == "}" and depth == 0:
                return at + 1
        raise self._error(self._tokens[self._at], "a section without its braces")

    def _after_words(self, count: int) -> int:
        """Index after the directive's ``count`` operands and further ones that commas add."""
        at = self._at + 1 + count
        while self._text_at(at) == ",":
            at += 2
        return self._checked(at)

    def _after_location(self) -> int:
        """Index after ``.loc file line column``, with its position in the inlined function."""
        at = self._at + 4
        if self._text_at(at) == "," and self._text_at(at + 1) == "function_name":
            at += 3
            while self._text_at(at) == "+":
                at += 2
        if self._text_at(at) == "," and self._text_at(at + 1) == "inlined_at":
            at += 5
        return self._checked(at)

    def _checked(self, at: int) -> int:
        if at > len(self._tokens):
            raise self._error(self._tokens[self._at], "a directive without its operands")
        return at

    def _error(self, token: Token, problem: str) -> BadPtx:
        return bad_ptx(token.line, problem)


def function_name(head: Statement) -> Token | None:
    """The token of a function's name: the first word outside of parentheses that is no directive.

    None if there is none, which :func:`split` refuses.
    """
    depth = 0
    for token in head.tokens:
        depth += (token.text == "(") - (token.text == ")")
        if depth == 0 and token.kind is TokenKind.WORD and token.text[0] != ".":
            return token
    return None


_SINGLE = MappingProxyType(
    {"{": StatementKind.OPEN, "}": StatementKind.CLOSE, ";": StatementKind.EMPTY}
)
_ENDS: MappingProxyType[str, Callable[[_Splitter], int]] = MappingProxyType(
    {
        ".version": lambda cursor: cursor._after_words(1),
        ".target": lambda cursor: cursor._after_words(1),
        ".address_size": lambda cursor: cursor._after_words(1),
        ".file": lambda cursor: cursor._after_words(2),
        ".loc": _Splitter._after_location,
        ".section": _Splitter._after_braces,
    }
)
"""Directive -> end of its statement; all others end with a semicolon."""
