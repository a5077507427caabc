"""One PTX instruction: guard, opcode, operands, and what it reads and writes.

Special registers of PTX (PTX ISA 9.0, section 10).

Names in operands: registers, parts of registers, special registers, symbols.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from nostall.ptx.program.declarations import KERNEL_PARAMETER, Scope
from nostall.ptx.program.opcodes import UNKNOWN, Rule, effect_of, find_rule
from nostall.ptx.program.resources import DEVICE_FENCE, EVERYTHING, PURE, Effect, Reference
from nostall.ptx.text import Statement, Token, TokenKind

_CONSTANT = (
    "tid",
    "ntid",
    "laneid",
    "nwarpid",
    "ctaid",
    "nctaid",
    "nsmid",
    "gridid",
    "is_explicit_cluster",
    "clusterid",
    "nclusterid",
    "cluster_ctaid",
    "cluster_nctaid",
    "cluster_ctarank",
    "cluster_nctarank",
    "lanemask_eq",
    "lanemask_le",
    "lanemask_lt",
    "lanemask_ge",
    "lanemask_gt",
    "reserved_smem_offset_begin",
    "reserved_smem_offset_end",
    "reserved_smem_offset_cap",
    "total_smem_size",
    "aggr_smem_size",
    "dynamic_smem_size",
    "current_graph_exec",
)
"""Registers that keep one value while a thread runs."""
_CONSTANT_RANGES = ("envreg", "reserved_smem_offset_")
_CHANGING = (
    "clock",
    "clock_hi",
    "clock64",
    "globaltimer",
    "globaltimer_lo",
    "globaltimer_hi",
    "warpid",
    "smid",
)
"""Registers whose value depends on when they are read; their reads keep their order."""
_CHANGING_RANGES = ("pm",)

SPECIAL_REGISTERS: MappingProxyType[str, Effect] = MappingProxyType(
    dict.fromkeys(_CONSTANT, PURE) | dict.fromkeys(_CHANGING, DEVICE_FENCE)
)
_RANGES: MappingProxyType[str, Effect] = MappingProxyType(
    dict.fromkeys(_CONSTANT_RANGES, PURE) | dict.fromkeys(_CHANGING_RANGES, DEVICE_FENCE)
)
_NAME = re.compile(r"%([a-z_0-9]+?)(?:\.[xyzw])?$")
_NUMBERED = re.compile(r"([a-z_]+?)\d+(?:_64)?$")


def special_register(word: str) -> Effect | None:
    """The effect of a read of the special register ``word``; None if it is none that is known."""
    match = _NAME.match(word)
    if match is None:
        return None
    name = match.group(1)
    if name in SPECIAL_REGISTERS:
        return SPECIAL_REGISTERS[name]
    numbered = _NUMBERED.match(name)
    return _RANGES.get(numbered.group(1)) if numbered else None


_CONSTANTS = frozenset(("_", "WARP_SZ"))
"""Words that name nothing that changes."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a word of an operand means."""

    register: str | None = None
    """The unique name of a register; None for a number, a symbol or a special register."""
    is_part: bool = False
    """Whether the word names a part of the register, as ``v.x`` and ``d.h0`` do."""
    effect: Effect = PURE
    """The effect of reading it, if it is a special register."""
    is_known: bool = True
    """False if nothing declares the name: it may be anything, so the instruction is a fence."""


_NOTHING = Name()


def resolve(word: str, scope: Scope) -> Name:
    """The meaning of ``word`` in ``scope``; a name that is not declared counts as a register."""
    if word in _CONSTANTS or word[0].isdecimal() or word[0] == ".":
        return _NOTHING
    if scope.find(word):
        return Name(scope.register(word))
    base = word.rpartition(".")[0]
    if base and scope.find(base):
        return Name(scope.register(base), is_part=True)
    effect = special_register(word)
    if effect is not None:
        return Name(effect=effect)
    return Name(word, effect=EVERYTHING, is_known=False)


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
        """Whether the operand is an address: ``[a+4]``, or ``a[4]``."""
        return any(token.text == "[" for token in self.tokens)

    @property
    def words(self) -> tuple[str, ...]:
        """Registers, symbols and numbers of the operand; ``v .x`` is one word."""
        return tuple(_join_parts(self.tokens))


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
    """Whether the opcode table has a row for the opcode, and all names are declared."""
    start: int
    """Offset of the guard or the opcode in the text."""
    opcode_span: tuple[int, int]
    """Offsets of the opcode; it may have white space before its dots."""
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
    end = _opcode_end(tokens, at)
    opcode = "".join(token.text for token in tokens[at:end])
    operands = tuple(_operands(tokens[end:]))
    words = frozenset(word for operand in operands for word in operand.words)
    names = {word: resolve(word, scope) for word in words}
    rule = find_rule(opcode)
    ends_block = rule is not None and rule.ends_block
    if ends_block:  # other names are labels
        names = {word: name for word, name in names.items() if name.is_known}
    elif not all(name.is_known for name in names.values()):
        rule = None
    reads, writes = _registers(rule or UNKNOWN, operands, names)
    if guard is not None:
        reads |= writes | {guard.register}
        words |= {guard.register.partition("@")[0]}
    effect = _effect(rule, opcode, operands, scope)
    for name in names.values():
        effect |= name.effect
    return Instruction(
        index,
        opcode,
        guard,
        operands,
        frozenset(reads) | effect.reads,
        frozenset(writes) | effect.writes,
        words,
        ends_block,
        rule is not None,
        statement.start,
        (tokens[at].start, tokens[end - 1].end),
        statement.end,
    )


def _opcode_end(tokens: Sequence[Token], at: int) -> int:
    """Index after the opcode that begins at ``at``: qualifiers may stand apart, as ``add .cc``."""
    at += 1
    while at < len(tokens) and _is_part(tokens[at]):
        at += 1
    return at


def _is_part(token: Token) -> bool:
    """Whether the token continues the word before it."""
    return token.kind is TokenKind.WORD and token.text[0] == "."


def _join_parts(tokens: Sequence[Token]) -> Iterator[str]:
    """The words of ``tokens``, each with the parts that follow it."""
    word = ""
    for token in tokens:
        if word and _is_part(token):
            word += token.text
            continue
        if word:
            yield word
        word = token.text if token.kind is TokenKind.WORD else ""
    if word:
        yield word


def _effect(rule: Rule | None, opcode: str, operands: Sequence[Operand], scope: Scope) -> Effect:
    """The effect of an instruction, without that of its special registers."""
    if rule is None:
        return EVERYTHING
    if _loads_parameter(opcode, operands, scope):
        return PURE
    return effect_of(rule, tuple(opcode.split(".")[1:]))


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
    rule: Rule, operands: Sequence[Operand], names: Mapping[str, Name]
) -> tuple[set[Reference], set[Reference]]:
    """Registers that the operands read, and registers that they write."""
    reads: set[Reference] = set()
    writes: set[Reference] = set()
    for position, operand in enumerate(operands):
        written = rule.touches_all or (
            not operand.is_address and position in (*rule.writes, *rule.updates)
        )
        read = rule.touches_all or not written or position in rule.updates
        for name in (names[word] for word in operand.words if word in names):
            if name.register is None:
                continue
            if written:
                writes.add(name.register)
            if read or name.is_part:
                reads.add(name.register)
    return reads, writes


def _loads_parameter(opcode: str, operands: Sequence[Operand], scope: Scope) -> bool:
    """Whether the instruction loads from a parameter of a kernel, which never changes."""
    if not opcode.startswith("ld.param"):
        return False
    declared = (scope.find(word) for operand in operands[1:] for word in operand.words)
    return any(found is not None and found[0].space == KERNEL_PARAMETER for found in declared)
