"""A PTX module: its text, its functions, and the opcodes that the opcode table does not know."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from nostall.core.errors import BadInput
from nostall.core.text.suggest import listed
from nostall.ptx.errors import bad_ptx
from nostall.ptx.program.blocks import Block, build_blocks, flatten
from nostall.ptx.program.body import build_body
from nostall.ptx.program.control_flow import ControlFlow, analyse_control_flow
from nostall.ptx.program.declarations import (
    FUNCTION,
    KERNEL_PARAMETER,
    Declaration,
    Scope,
    declarations,
)
from nostall.ptx.program.instruction import Instruction
from nostall.ptx.text import Statement, StatementKind, TokenKind, function_name, split


@dataclass(frozen=True)
class Function:
    """A function with a body: an entry kernel or a device function."""

    name: str
    is_kernel: bool
    head: Statement
    """The statement from the linkage to the directives after the parameters."""
    instructions: tuple[Instruction, ...]
    """All of them, in the order of the text; ``Instruction.index`` is the position."""
    outer_blocks: tuple[Block, ...]
    """The blocks outside of scopes."""
    flow: ControlFlow
    end: int
    """Offset of the first character after the body."""

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks: each outer one, followed by those of the scopes in it."""
        return tuple(flatten(self.outer_blocks))

    @cached_property
    def words(self) -> frozenset[str]:
        """All names that its instructions use."""
        return frozenset().union(*(i.words for i in self.instructions))


@dataclass(frozen=True)
class Module:
    """A PTX text and what it defines."""

    text: str
    statements: tuple[Statement, ...]
    functions: tuple[Function, ...]
    """The functions that have a body, in the order of the text."""
    target: str
    """The architecture, such as sm_90a."""

    @cached_property
    def kernels(self) -> tuple[Function, ...]:
        """The entry functions."""
        return tuple(function for function in self.functions if function.is_kernel)

    @cached_property
    def unknown_opcodes(self) -> Counter[str]:
        """Opcodes that the opcode table lacks, counted. Nothing moves across them."""
        return Counter(
            i.opcode for function in self.functions for i in function.instructions if not i.is_known
        )

    @cached_property
    def outer_words(self) -> frozenset[str]:
        """Names in the directives outside of functions, such as the initial values of a table."""
        bodies = [(function.head.start, function.end) for function in self.functions]
        return frozenset(
            token.text
            for statement in self.statements
            if statement.kind is StatementKind.DIRECTIVE
            and not any(start <= statement.start < end for start, end in bodies)
            for token in statement.tokens
            if token.kind is TokenKind.WORD
        )

    def kernel(self, name: str | None = None) -> Function:
        """The kernel called ``name``; without a name, the only kernel.

        Raises :class:`BadInput` if there is no such kernel, or several without a name.
        """
        names = [kernel.name for kernel in self.kernels]
        if name is None and len(names) == 1:
            return self.kernels[0]
        if name is None or name not in names:
            problem = "no kernel was named" if name is None else f"no kernel {name!r}"
            raise BadInput(f"{problem} in this PTX; name one of: {listed(names)} (--kernel)")
        return self.kernels[names.index(name)]


def parse(text: str) -> Module:
    """The module of a PTX text.

    Raises :class:`~nostall.ptx.errors.BadPtx`, with the line number, if the text is not PTX.
    """
    statements = split(text)
    if not any(statement.tokens[0].text == ".version" for statement in statements):
        raise bad_ptx(1, "the text has no .version directive")
    target = next((s.tokens[1].text for s in statements if s.tokens[0].text == ".target"), None)
    if target is None:
        raise bad_ptx(1, "the text has no .target directive")
    return Module(text, statements, tuple(_functions(text, statements)), target)


def _functions(text: str, statements: Sequence[Statement]) -> Iterator[Function]:
    module_scope = Scope(-1)
    at = 0
    while at < len(statements):
        statement = statements[at]
        if statement.kind is StatementKind.DIRECTIVE:
            for declaration in declarations(statement.tokens):
                if declaration.space == "reg":
                    raise bad_ptx(
                        statement.tokens[0].line,
                        "a register outside of functions",
                        "declare registers in functions, as PTX with an ABI does",
                    )
                module_scope.add(declaration)
        if statement.kind is StatementKind.FUNCTION:
            module_scope.add(Declaration(_name(statement), FUNCTION))
        if statement.kind is not StatementKind.FUNCTION or statement.is_prototype:
            at += 1
            continue
        end = _body_end(statements, at + 1)
        yield _function(text, statement, statements[at + 1 : end], Scope(0, module_scope))
        at = end


def _name(head: Statement) -> str:
    token = function_name(head)
    assert token is not None
    return token.text


def _body_end(statements: Sequence[Statement], start: int) -> int:
    """Index after the closing brace of the body that begins at ``start``."""
    depth = 0
    for at in range(start, len(statements)):
        kind = statements[at].kind
        depth += (kind is StatementKind.OPEN) - (kind is StatementKind.CLOSE)
        if depth == 0:
            return at + 1
    line = statements[start - 1].tokens[0].line
    raise bad_ptx(line, "a function without a body")


def _function(text: str, head: Statement, body: Sequence[Statement], scope: Scope) -> Function:
    is_kernel = any(token.text == ".entry" for token in head.tokens)
    for declaration in declarations(head.tokens):
        scope.add(replace(declaration, space=KERNEL_PARAMETER) if is_kernel else declaration)
    tree = build_body(body, scope)
    flow = analyse_control_flow(tree)
    blocks = build_blocks(text, tree, flow)
    return Function(_name(head), is_kernel, head, tree.instructions, blocks, flow, body[-1].end)
