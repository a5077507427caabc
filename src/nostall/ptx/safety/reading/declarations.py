"""Names that declarations and function headers introduce (PTX ISA 4.3.1, 5.4, 7.1, 11.2)."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from nostall.ptx.safety.reading.lexical import ModuleItem, Unreadable

Space = Literal[
    "reg", "param", "entry-param", "shared", "local", "global", "const", "function", "label"
]


class Declared(NamedTuple):
    """One declared name, or a range of them."""

    name: str
    space: Space
    size: int = 0
    """Size of a range: of ``%r<5>`` 5, and the names are %r0 to %r4. 0 for a single name."""
    is_vector: bool = False
    """Whether it is a vector register, whose elements are ``name.x`` and so on."""


_SPACES: dict[str, Space] = {
    "reg": "reg",
    "param": "param",
    "shared": "shared",
    "local": "local",
    "global": "global",
    "const": "const",
}
_DECLARATION = re.compile(rf"\s*(?:\.(?:extern|visible|weak|common)\s+)*\.({'|'.join(_SPACES)})\b")
MAX_DIGITS = 9
"""Most digits of a register's index."""
_LAST_NAME = re.compile(rf"([\w$%]+)\s*(?:<\s*(\d{{1,{MAX_DIGITS}}})\s*>)?\s*$")
_IRRELEVANT = re.compile(r"\[[^\]]*\]|\([^()]*\)")
"""Array sizes and attributes."""
_VALUE = re.compile(r"=\s*(?:\{[^;]*\}(?=\s*(?:,|$))|[^,;{}]*)")
_HEADER = re.compile(
    r"""\.(?P<kind>entry|func)\s*
    (?:\.attribute\s*\([^()]*\)\s*|\.noreturn\b\s*)*
    (?P<results>\([^()]*\))?\s*(?P<name>[\w$%]+)\s*(?P<parameters>\([^()]*\))?""",
    re.VERBOSE,
)


def is_declaration(text: str) -> bool:
    """Whether a directive declares registers or variables."""
    return _DECLARATION.match(text) is not None


def declared_names(text: str, offset: int) -> tuple[Declared, ...]:
    """The names of a declaration such as ``.reg .b32 %r<5>, %x;``."""
    match = _DECLARATION.match(text)
    assert match is not None
    return tuple(_declarators(text[match.end() :].rstrip("; \t\n"), _SPACES[match[1]], offset))


def _declarators(text: str, space: Space, offset: int) -> list[Declared]:
    is_vector = re.search(r"\.v[248]\b", text) is not None
    found: list[Declared] = []
    for part in _IRRELEVANT.sub("", _VALUE.sub("", text)).split(","):
        match = _LAST_NAME.search(part)
        if match is None:
            raise Unreadable(offset, f"a declaration has no name in {part.strip()!r}")
        found.append(Declared(match[1], space, int(match[2] or 0), is_vector))
    return found


class Header(NamedTuple):
    """Name and parameters of a function."""

    name: str
    is_entry: bool
    parameters: tuple[Declared, ...]
    """Results and parameters."""


def read_header(item: ModuleItem) -> Header:
    """Read the header of a function or of its prototype."""
    match = _HEADER.search(item.text)
    if match is None:
        raise Unreadable(item.offset, "a function header has no name")
    is_entry = match["kind"] == "entry"
    parameters: list[Declared] = []
    for group in (match["results"], match["parameters"]):
        for part in (group or "()")[1:-1].split(","):
            if part.strip() in ("", "_"):
                continue
            space: Space = "entry-param" if is_entry else "param"
            if re.match(r"\s*\.reg\b", part):
                space = "reg"
            parameters += _declarators(part, space, item.offset)
    return Header(match["name"], is_entry, tuple(p for p in parameters if p.name != "_"))
