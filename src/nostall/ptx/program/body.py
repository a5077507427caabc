"""The body of a function as a tree: instructions, labels and directives, nested by their scopes.

Registers that asynchronous matrix instructions use after their issue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from nostall.ptx.program.declarations import LIST, Declaration, Scope, declarations
from nostall.ptx.program.instruction import Instruction, build_instruction
from nostall.ptx.program.resources import Resource
from nostall.ptx.text import Statement, StatementKind, TokenKind

_ASYNCHRONOUS: tuple[tuple[str, Resource], ...] = (
    ("wgmma.mma_async", Resource.WGMMA),
    ("tcgen05", Resource.TCGEN05),
)
"""Opcode that uses registers after its issue -> resource that its waits and fences write."""


def mark_asynchronous_registers(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Let each instruction that touches a register of an asynchronous one read its resource.

    A wait names no register, but the program may read accumulators only after it, and write
    fragments only before a fence. The registers of all such instructions of the function count,
    because those in flight at a wait may have been named in another block, and so do copies: Triton
    copies accumulators before a wait and names the copies in a comment, and ptxas makes both one
    register.
    """
    marked = list(instructions)
    for opcode, resource in _ASYNCHRONOUS:
        users = {i.index for i in marked if f"{i.opcode}.".startswith(f"{opcode}.")}
        registers = _with_copies(
            marked, frozenset(name for index in users for name in marked[index].registers)
        )
        if registers:
            marked = [
                i.with_reads(resource) if i.index in users or i.registers & registers else i
                for i in marked
            ]
    return marked


def _with_copies(instructions: Sequence[Instruction], registers: frozenset[str]) -> frozenset[str]:
    """``registers``, those that a ``mov`` copies them to, and so on."""
    while True:
        copies = frozenset(
            name
            for i in instructions
            if i.base == "mov" and i.registers & registers
            for name in i.writes
            if isinstance(name, str)
        )
        if copies <= registers:
            return registers
        registers |= copies


_LISTS = frozenset((".branchtargets", ".calltargets", ".callprototype"))
"""Directives whose label is a name of the directive, no place in the code."""
_NO_REFERENCE = frozenset((".loc", ".file", ".pragma"))
"""Directives that name labels for debuggers only, or none."""


@dataclass(frozen=True, slots=True)
class Label:
    """A place in the code."""

    name: str
    start: int
    end: int


class Binding(Enum):
    """What a directive says about the instruction that follows it."""

    NONE = "nothing"
    NEXT = "it applies to the next instruction, and moves with it"
    UNKNOWN = "it may apply to the next instruction: both keep their place"


@dataclass(frozen=True, slots=True)
class Directive:
    """A directive in a body, and the names that it declares for the statements after it."""

    declared: tuple[Declaration, ...]
    words: frozenset[str]
    binding: Binding
    start: int
    end: int


@dataclass(slots=True)
class Nested:
    """The statements between two braces. The tree is complete after :func:`build_body`."""

    start: int
    """Offset of the opening brace."""
    end: int = 0
    """Offset of the first character after the closing brace."""
    items: list[int | Label | Directive | Nested] = field(default_factory=list)
    """In the order of the text; an instruction is given by its index in the function."""
    labels: dict[str, Label] = field(default_factory=dict)
    """Labels of these braces, without those of inner ones."""


@dataclass(frozen=True, slots=True)
class Body:
    """The tree of a function, and its instructions."""

    root: Nested
    instructions: tuple[Instruction, ...]


class _Builder:
    """Reads the statements of one body in order."""

    def __init__(self, statements: Sequence[Statement]) -> None:
        self._statements = statements
        self._at = 0
        self._scopes = 0
        self.instructions: list[Instruction] = []

    def nested(self, scope: Scope) -> Nested:
        """The tree from the opening brace at the cursor to its closing brace."""
        tree = Nested(self._statements[self._at].start)
        self._at += 1
        while True:
            statement = self._statements[self._at]
            if statement.kind is StatementKind.CLOSE:
                tree.end = statement.end
                self._at += 1
                return tree
            if statement.kind is StatementKind.OPEN:
                self._scopes += 1
                tree.items.append(self.nested(Scope(self._scopes, scope)))
                continue
            self._at += 1
            if statement.kind is StatementKind.INSTRUCTION:
                index = len(self.instructions)
                self.instructions.append(build_instruction(index, statement, scope))
                tree.items.append(index)
            elif statement.kind is StatementKind.DIRECTIVE:
                tree.items.append(_directive(statement, scope))
            elif statement.kind is StatementKind.LABEL:
                tree.items.append(self._label(statement, scope, tree))

    def _label(self, statement: Statement, scope: Scope, tree: Nested) -> Label | Directive:
        name = statement.tokens[0].text
        following = self._statements[self._at]
        if following.tokens[0].text in _LISTS:
            declared = Declaration(name, LIST)
            scope.add(declared)
            return Directive((declared,), frozenset(), Binding.NONE, statement.start, statement.end)
        label = Label(name, statement.start, statement.end)
        tree.labels[name] = label
        return label


def _directive(statement: Statement, scope: Scope) -> Directive:
    declared = tuple(declarations(statement.tokens))
    for declaration in declared:
        scope.add(declaration)
    words: frozenset[str] = frozenset()
    if statement.tokens[0].text not in _NO_REFERENCE:
        words = frozenset(t.text for t in statement.tokens if t.kind is TokenKind.WORD)
    return Directive(declared, words, _binding(statement), statement.start, statement.end)


_PRAGMAS = MappingProxyType(
    {
        "nounroll": Binding.NONE,
        "frequency": Binding.NONE,
        "enable_smem_spilling": Binding.NONE,
        "used_bytes_mask": Binding.NEXT,
    }
)
"""First word of a pragma -> its binding (PTX ISA 9.0, section 12)."""


def _binding(statement: Statement) -> Binding:
    """The strongest binding of the strings of a pragma; other directives have none."""
    if statement.tokens[0].text != ".pragma":
        return Binding.NONE
    strings = [t.text.strip('"').split() for t in statement.tokens if t.kind is TokenKind.STRING]
    found = {_PRAGMAS.get(words[0] if words else "", Binding.UNKNOWN) for words in strings}
    order = (Binding.UNKNOWN, Binding.NEXT)
    return next((binding for binding in order if binding in found), Binding.NONE)


def build_body(statements: Sequence[Statement], scope: Scope) -> Body:
    """The tree of the statements from the opening to the closing brace of a function.

    ``scope`` has the parameters of the function, and takes up the names of its outermost braces.
    """
    builder = _Builder(statements)
    root = builder.nested(scope)
    return Body(root, tuple(mark_asynchronous_registers(builder.instructions)))


def walk(tree: Nested) -> Iterator[tuple[int | Label | Directive, tuple[Nested, ...]]]:
    """Every item of the tree, in the order of the text, with the braces that enclose it."""
    yield from _walk((tree,))


def _walk(
    chain: tuple[Nested, ...],
) -> Iterator[tuple[int | Label | Directive, tuple[Nested, ...]]]:
    for item in chain[-1].items:
        if isinstance(item, Nested):
            yield from _walk((*chain, item))
        else:
            yield item, chain
