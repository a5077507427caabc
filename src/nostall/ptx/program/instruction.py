"""One PTX instruction: guard, opcode, operands, and what it reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nostall.ptx.program.declarations import KERNEL_PARAMETER, Scope
from nostall.ptx.program.opcodes import UNKNOWN, Rule, effect_of, find_rule
from nostall.ptx.program.resources import EVERYTHING, PURE, Effect, Reference
from nostall.ptx.program.special_registers import special_register
from nostall.ptx.text.lexer import Token, TokenKind
from nostall.ptx.text.statements import Statement


@dataclass(frozen=True, slots=True)
class Guard:
    """The predicate ``@p`` or ``@!p`` before an instruction."""

    register: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand: the tokens between two commas."""

    tokens: tuple[Token, ...]

    @property
    def is_address(self) -> bool:
        """Whether the operand is an address in brackets."""
        return self.tokens[0].text == "["

    @property
    def words(self) -> tuple[str, ...]:
        """Registers, symbols and numbers of the operand."""
        return tuple(token.text for token in self.tokens if token.kind is TokenKind.WORD)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a function."""

    index: int
    """Position among the instructions of its function, in the order of the text."""
    opcode: str
    """With all qualifiers, such as ``ld.global.v4.b32``."""
    guard: Guard | None
    operands: tuple[Operand, ...]
    reads: frozenset[Reference]
    """Registers and other resources that are read. A write that may not happen (guarded) or does
    not replace the whole register also reads the register."""
    writes: frozenset[Reference]
    words: frozenset[str]
    """Names that the operands and the guard use, as they are written."""
    ends_block: bool
    """Whether control may continue elsewhere."""
    is_known: bool
    """Whether the opcode table has a row for the opcode."""
    start: int
    """Offset of the guard or the opcode in the text."""
    opcode_start: int
    end: int
    """Offset of the first character after the semicolon."""

    @property
    def base(self) -> str:
        """The opcode without qualifiers."""
        return self.opcode.partition(".")[0]

    @property
    def qualifiers(self) -> tuple[str, ...]:
        """The parts of the opcode after its base."""
        return tuple(self.opcode.split(".")[1:])

    @property
    def registers(self) -> frozenset[str]:
        """All registers that are read or written."""
        return frozenset(name for name in self.reads | self.writes if isinstance(name, str))

    def with_reads(self, *references: Reference) -> Instruction:
        """A copy that also reads ``references``."""
        return replace(self, reads=self.reads | frozenset(references))


def build_instruction(index: int, statement: Statement, scope: Scope) -> Instruction:
    """The instruction of a statement; names are resolved in ``scope``."""
    tokens = statement.tokens[:-1]
    guard, at = _guard(tokens, scope)
    opcode = tokens[at].text
    operands = tuple(_operands(tokens[at + 1 :]))
    rule = find_rule(opcode)
    qualifiers = tuple(opcode.split(".")[1:])
    effect = EVERYTHING if rule is None else effect_of(rule, qualifiers)
    if _loads_parameter(opcode, operands, scope):
        effect = PURE
    reads, writes = _registers(rule or UNKNOWN, operands, scope)
    if guard is not None:
        reads |= writes | {guard.register}
    words = frozenset(token.text for token in tokens if token.kind is TokenKind.WORD)
    words -= {opcode}
    effect |= _special_effect(words, scope)
    return Instruction(
        index,
        opcode,
        guard,
        operands,
        frozenset(reads) | effect.reads,
        frozenset(writes) | effect.writes,
        words,
        rule is not None and rule.ends_block,
        rule is not None,
        statement.start,
        tokens[at].start,
        statement.end,
    )


def _guard(tokens: Sequence[Token], scope: Scope) -> tuple[Guard | None, int]:
    """The guard, and the position of the opcode."""
    if tokens[0].text != "@":
        return None, 0
    negated = len(tokens) > 1 and tokens[1].text == "!"
    at = 2 if negated else 1
    name = tokens[at].text
    return Guard(scope.register(name) or name, negated), at + 1


def _operands(tokens: Sequence[Token]) -> Iterator[Operand]:
    """Operands: parts between the commas outside of brackets, braces and parentheses."""
    depth = 0
    part: list[Token] = []
    for token in tokens:
        if token.text == "," and depth == 0:
            if part:
                yield Operand(tuple(part))
            part = []
            continue
        if token.kind is TokenKind.MARK:
            depth += (token.text in "[{(") - (token.text in "]})")
        part.append(token)
    if part:
        yield Operand(tuple(part))


def _registers(
    rule: Rule, operands: Sequence[Operand], scope: Scope
) -> tuple[set[Reference], set[Reference]]:
    """Registers that the operands read, and registers that they write."""
    reads: set[Reference] = set()
    writes: set[Reference] = set()
    for position, operand in enumerate(operands):
        written = rule.touches_all or (
            not operand.is_address and position in (*rule.writes, *rule.updates)
        )
        read = rule.touches_all or not written or position in rule.updates
        for word in operand.words:
            register, partial = _resolve(word, scope)
            if register is None:
                continue
            if written:
                writes.add(register)
            if read or partial:
                reads.add(register)
    return reads, writes


def _resolve(word: str, scope: Scope) -> tuple[str | None, bool]:
    """The register that ``word`` names, and whether it names only a part, as ``v.x`` and ``d.h0``.

    A name that begins with % and is neither declared nor special counts as a register.
    """
    if word == "_" or word[0].isdecimal():
        return None, False
    if found := scope.find(word):
        return scope.register(word) if found[0].space == "reg" else None, False
    base, _, part = word.rpartition(".")
    if base and (register := scope.register(base)):
        return register, bool(part)
    if word.startswith("%") and special_register(word) is None:
        return word, False
    return None, False


def _loads_parameter(opcode: str, operands: Sequence[Operand], scope: Scope) -> bool:
    """Whether the instruction loads from a parameter of a kernel, which never changes."""
    if not opcode.startswith("ld.param"):
        return False
    declared = (scope.find(word) for operand in operands[1:] for word in operand.words)
    return any(found is not None and found[0].space == KERNEL_PARAMETER for found in declared)


def _special_effect(words: frozenset[str], scope: Scope) -> Effect:
    """The effect of reading special registers; those that are not known count as clocks."""
    effect = PURE
    for word in words:
        if word.startswith("%") and _resolve(word, scope)[0] is None:
            effect |= special_register(word) or PURE
        elif word.startswith("%") and scope.register(word) is None:
            known_base = scope.register(word.rpartition(".")[0])
            effect |= PURE if known_base else EVERYTHING
    return effect
