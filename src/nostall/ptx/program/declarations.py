"""Declarations of registers, variables and parameters, and the scopes in which they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nostall.ptx.errors import bad_ptx
from nostall.ptx.text import Token, TokenKind

_SPACES = frozenset((".reg", ".local", ".shared", ".param", ".const", ".global", ".sreg", ".tex"))
"""State spaces: the first word of a declaration after its linkage."""
_MOST_DIGITS = 9
KERNEL_PARAMETER = "kernel parameter"
"""The space of an entry function's parameters: memory that never changes."""
FUNCTION = "function"
"""The space of functions."""
LIST = "list"
"""The space of lists of targets and of prototypes of calls."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """One declared name, or the range ``%r<count>`` of names %r0 to %r(count-1)."""

    name: str
    space: str
    """The state space without its dot, KERNEL_PARAMETER, FUNCTION, or LIST."""
    count: int | None = None

    def declares(self, word: str) -> bool:
        """Whether ``word`` is a name of this declaration."""
        return self.unique_name(word) is not None

    def unique_name(self, word: str) -> str | None:
        """The one spelling of ``word``; None if it is no name of this declaration.

        ptxas takes %r01 of a range for %r1.
        """
        if self.count is None:
            return word if word == self.name else None
        number = word.removeprefix(self.name) if word.startswith(self.name) else ""
        if not _is_number(number) or int(number) >= self.count:
            return None
        return f"{self.name}{int(number)}"


def declarations(tokens: tuple[Token, ...]) -> Iterator[Declaration]:
    """The names that a declaration, or a list of parameters, declares.

    A name is the word after which a declarator ends: before ``,`` ``;`` ``)`` ``[`` ``<`` or ``=``.
    Words of initial values, which follow ``=``, are no names.
    """
    space: str | None = None
    depth = 0
    is_value = False
    for at, token in enumerate(tokens):
        if token.text in _SPACES and depth == 0:
            space = token.text[1:]
        depth += (token.text in "[{<") - (token.text in "]}>") if len(token.text) == 1 else 0
        if depth == 0 and token.text in ("=", ","):
            is_value = token.text == "="
        is_name = token.kind is TokenKind.WORD and token.text[0] != "."
        if space is None or depth or is_value or not is_name:
            continue
        follower = tokens[at + 1].text if at + 1 < len(tokens) else ""
        if follower == "<":
            yield Declaration(token.text, space, _count(tokens[at + 2]))
        elif follower in (",", ";", ")", "[", "=") and not token.text[0].isdecimal():
            yield Declaration(token.text, space)


@dataclass(slots=True)
class Scope:
    """Names declared between two braces, or at the top of the file; inner scopes come first."""

    number: int
    """0 for a function's parameters and outermost braces; the number makes registers unique."""
    parent: Scope | None = None
    _names: dict[str, Declaration] = field(default_factory=dict)
    _ranges: list[Declaration] = field(default_factory=list)

    def add(self, declaration: Declaration) -> None:
        """Declare a name for the statements that follow."""
        if declaration.count is None:
            self._names[declaration.name] = declaration
        else:
            self._ranges.append(declaration)

    def find(self, word: str) -> tuple[Declaration, Scope] | None:
        """The declaration of ``word`` that holds here, and its scope."""
        scope: Scope | None = self
        while scope is not None:
            declaration = scope._names.get(word)
            if declaration is None:
                declaration = next((d for d in scope._ranges if d.declares(word)), None)
            if declaration is not None:
                return declaration, scope
            scope = scope.parent
        return None

    def register(self, word: str) -> str | None:
        """The unique name of the register ``word``; None if no register of that name is declared.

        It is the word itself in the outermost braces of a function, and word@number in a scope.
        """
        found = self.find(word)
        if found is None or found[0].space != "reg":
            return None
        name = found[0].unique_name(word)
        return name if found[1].number == 0 else f"{name}@{found[1].number}"


def _count(token: Token) -> int:
    """The number of registers of a range: decimal, or as in C hexadecimal or octal."""
    digits, base = token.text, 10
    if digits[:2] in ("0x", "0X"):
        digits, base = digits[2:], 16
    elif digits[0] == "0":
        base = 8
    try:
        if len(digits) <= _MOST_DIGITS:
            return int(digits, base)
    except ValueError:
        pass
    raise bad_ptx(token.line, f"{token.text!r} is no number of registers")


def _is_number(text: str) -> bool:
    """Whether ``text`` is a decimal number that the number of a register can be."""
    return text.isdecimal() and len(text) <= _MOST_DIGITS
