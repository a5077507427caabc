"""Edits of a module's text for the settings of one kernel: its name, register budget and hints."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from nostall.core.errors import BadInput
from nostall.ptx.program.declarations import declarations
from nostall.ptx.program.module import Function, Module
from nostall.ptx.schedule.edits import Edit
from nostall.ptx.schedule.hints import allowed_hints, hint_edit
from nostall.ptx.schedule.state import PtxState
from nostall.ptx.text import Statement, StatementKind, TokenKind, function_name

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_$]*|[_$][A-Za-z0-9_$]+")


def kernel_edits(module: Module, kernel: Function, state: PtxState) -> list[Edit]:
    """The edits that the settings of ``state`` make.

    Raises :class:`BadInput` if a name, a budget or a hint cannot be given to this kernel.
    """
    edits: list[Edit] = []
    if state.kernel_name not in ("", kernel.name):
        edits += rename_edits(module, kernel, state.kernel_name)
    if state.max_registers is not None:
        edits.append(register_edit(kernel, state.max_registers))
    for index, hint in state.hints:
        edits.append(_hint_edit(kernel, index, hint))
    return edits


def rename_edits(module: Module, kernel: Function, name: str) -> list[Edit]:
    """Edits that rename a kernel wherever its module names it.

    Parameters and labels whose names contain the kernel's name are other names, and stay.
    """
    words = {
        token.text
        for statement in module.statements
        for token in statement.tokens
        if token.kind is TokenKind.WORD
    }
    if not _NAME.fullmatch(name) or name in words:
        problem = "is used in the module" if name in words else "is no PTX identifier"
        raise BadInput(f"the kernel name {name!r} {problem}; choose another name")
    return [
        Edit(token.start, token.end, name)
        for statement in _statements_that_see(module, kernel)
        for token in statement.tokens
        if token.kind is TokenKind.WORD and token.text == kernel.name
    ]


def _statements_that_see(module: Module, kernel: Function) -> Iterator[Statement]:
    """Statements in which the name of ``kernel`` means the kernel.

    The body of a function that declares the name for something else is left out.
    """
    hidden = [
        range(function.head.start, function.end)
        for function in module.functions
        if _redeclares(module, function, kernel.name)
    ]
    for statement in module.statements:
        if _is_head_of(statement, kernel.name) or not any(statement.start in h for h in hidden):
            yield statement


def _is_head_of(statement: Statement, name: str) -> bool:
    if statement.kind is not StatementKind.FUNCTION:
        return False
    token = function_name(statement)
    return token is not None and token.text == name


def _redeclares(module: Module, function: Function, name: str) -> bool:
    body = (s for s in module.statements if function.head.start <= s.start < function.end)
    return any(
        (statement.kind is StatementKind.LABEL and statement.tokens[0].text == name)
        or any(declared.name == name for declared in declarations(statement.tokens))
        for statement in body
        if statement.kind is not StatementKind.INSTRUCTION
    )


def can_limit_registers(kernel: Function) -> bool:
    """Whether the register budget may change: setmaxnreg waits for registers of other warps."""
    return all(instruction.base != "setmaxnreg" for instruction in kernel.instructions)


def register_edit(kernel: Function, count: int) -> Edit:
    """The edit that limits the registers of a thread by ``.maxnreg``.

    The directive, not ptxas's option --maxrregcount: it belongs to one kernel of the module, the
    text stays the whole recipe, and ptxas ignores the option where the kernel has directives.
    """
    if not can_limit_registers(kernel):
        raise BadInput(
            f"{kernel.name} uses setmaxnreg, which may wait for ever with another register budget "
            f"than its own (got {count}); leave max_registers empty"
        )
    if not 16 <= count <= 255:
        raise BadInput(f"{count} registers a thread are not possible; give 16 to 255")
    tokens = kernel.head.tokens
    for token, following in itertools.pairwise(tokens):
        if token.text == ".maxnreg":
            return Edit(following.start, following.end, str(count))
    return Edit(kernel.head.end, kernel.head.end, f"\n.maxnreg {count}")


def _hint_edit(kernel: Function, index: int, hint: str) -> Edit:
    if not 0 <= index < len(kernel.instructions):
        raise BadInput(
            f"{kernel.name} has no instruction {index}; "
            f"give an index below {len(kernel.instructions)}"
        )
    instruction = kernel.instructions[index]
    allowed = allowed_hints(instruction)
    if hint not in allowed:
        raise BadInput(
            f"{instruction.opcode} cannot have the hint {hint!r}; allowed: {', '.join(allowed)}"
        )
    return hint_edit(instruction, hint)
