"""Lexical structure of PTX: module items and the statements of functions, without comments.

PTX ISA, chapters 4 (syntax) and 11 (directives).  A statement keeps its text; its meaning is found
by :mod:`.scope` and :mod:`.instruction`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

_MAX_DEPTH = 50
"""Most braces inside each other in a function."""
_BRACES = r"\{(?:[^{}\"]++|\{(?:[^{}\"]++|\{[^{}\"]*+\})*+\})*+\}"
"""An initialiser, with up to two levels of braces inside."""
_STRING = r'"(?:[^"\\\n]|\\[^"\n])*+"'
"""A string; a quotation mark cannot stand in it."""
_NAME = r"[\w$%]++"
_NOTE = rf"""
    \.loc\s+\d+\s+\d+\s+\d+
      (?:\s*,\s*function_name\s+{_NAME}(?:\s*\+\s*\w+)?\s*,\s*inlined_at\s+\d+\s+\d+\s+\d+)?
  | \.file\s+\d+\s+{_STRING}(?:\s*,\s*\d+\s*,\s*\d+)?
"""
"""Debugging directives, which no semicolon ends."""
_DIRECTIVE = rf'\.[a-z](?:[^;{{}}"]++|{_STRING}|{_BRACES})*+;'

_COMMENT = re.compile(rf"//[^\n]*+|/\*.*?\*/|{_STRING}", re.DOTALL)

_MODULE_ITEM = re.compile(
    rf"""\s*(?:
    (?P<note>{_NOTE}
      | \.version\s+\d+\.\d+ | \.target\s+\w+(?:\s*,\s*\w+)* | \.address_size\s+\d+)
  | (?P<section>\.section\s+[\w.$]+\s*\{{(?:[^{{}}"]++|{_STRING})*+\}})
  | (?P<function>(?:\.(?:visible|weak|extern|common)\s+)*\.(?:entry|func)\b
      (?:[^;{{}}"]++|{_STRING}(?:\s*,\s*{_STRING})*\s*;)*+)
  | (?P<directive>{_DIRECTIVE})
    )""",
    re.VERBOSE,
)

_STATEMENT = re.compile(
    rf"""\s*(?:
    (?P<label>{_NAME})\s*:(?!:)
  | (?P<instruction>[@A-Za-z_](?:[^;{{}}"]++|\{{[^{{}};"]*+\}})*+;)
  | (?P<open>\{{)
  | (?P<close>\}})
  | (?P<note>{_NOTE})
  | (?P<directive>{_DIRECTIVE})
    )""",
    re.VERBOSE,
)

StatementKind = Literal["label", "instruction", "open", "close", "note", "directive"]


class Body(NamedTuple):
    """The statements of a function, as three lists of one length."""

    kinds: list[str]
    """A :data:`StatementKind` each."""
    texts: list[str]
    """Texts without comments and without white space at the ends; of a label its name only."""
    offsets: list[int]
    """Positions in the text without comments."""


class Unreadable(Exception):
    """The text is not PTX that this reader understands."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(reason)
        self.offset = offset
        self.reason = reason


class ModuleItem(NamedTuple):
    """One directive of the module, or one function."""

    kind: Literal["note", "section", "directive", "prototype", "function"]
    text: str
    """Text of the directive; of a function its header."""
    offset: int
    body: Body = Body([], [], [])


def strip_comments(text: str) -> str:
    """The text with comments as white space; the number of newlines before a character stays."""
    return _COMMENT.sub(_blank, text)


def _blank(match: re.Match[str]) -> str:
    token = match[0]
    if token[0] == '"':
        return token
    return " " + "\n" * token.count("\n")


def line_of(text: str, offset: int) -> int:
    """Line number of a position, from 1."""
    return text.count("\n", 0, offset) + 1


def read_module(text: str) -> list[ModuleItem]:
    """The items of a text without comments.

    Raises :class:`Unreadable` at the first character that begins no item and no statement.
    """
    items: list[ModuleItem] = []
    position = 0
    while match := _MODULE_ITEM.match(text, position):
        kind = match.lastgroup
        assert kind is not None
        found, offset, position = match[kind], match.start(kind), match.end()
        if kind != "function":
            items.append(ModuleItem(kind, found, offset))  # type: ignore[arg-type]
        elif text[position : position + 1] == ";":
            items.append(ModuleItem("prototype", found.rstrip(), offset))
            position += 1
        elif text[position : position + 1] == "{":
            body, position = _read_body(text, position + 1)
            items.append(ModuleItem("function", found.rstrip(), offset, body))
        else:
            raise Unreadable(offset, "a function header must end with '{' or ';'")
    if rest := text[position:].strip():
        offset = len(text) - len(text[position:].lstrip())
        raise Unreadable(offset, f"{_excerpt(rest)} begins no directive and no function")
    return items


def _read_body(text: str, position: int) -> tuple[Body, int]:
    """The statements from after a function's opening brace, and the position after its end."""
    body = Body([], [], [])
    kinds, texts, offsets = body
    match_statement = _STATEMENT.match
    depth = 1
    while match := match_statement(text, position):
        position = match.end()
        kind = match.lastgroup
        assert kind is not None
        if kind == "open":
            depth += 1
            if depth > _MAX_DEPTH:
                raise Unreadable(match.start(kind), f"more than {_MAX_DEPTH} braces are open")
        elif kind == "close":
            depth -= 1
            if not depth:
                return body, position
        kinds.append(kind)
        texts.append(match[kind])
        offsets.append(match.start(kind))
    rest = text[position:].strip()
    offset = len(text) - len(text[position:].lstrip())
    raise Unreadable(
        offset,
        f"{_excerpt(rest)} begins no statement" if rest else "a function body has no closing '}'",
    )


def _excerpt(text: str) -> str:
    return repr(text.split("\n", 1)[0][:60])


def normalise(text: str) -> str:
    """The text with each run of white space as one space."""
    return " ".join(text.split())


_PUNCTUATION = re.compile(rf"({_STRING})|\s*([,;:()\[\]{{}}=<>])\s*")


def canonical(text: str) -> str:
    """A directive without white space that has no meaning; equal directives have equal ones."""
    return _PUNCTUATION.sub(lambda m: m[1] or m[2], normalise(text))
