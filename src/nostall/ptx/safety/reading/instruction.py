"""Instructions: statement text to registers, pseudo registers and a number that names it.

Equal instructions have equal numbers: the same guard, opcode without hints, and operands with the
same registers.  Anything that this module cannot take apart is :class:`Unreadable` or reads and
writes all registers that it names.

Cache hints that a candidate may add, change or remove.

PTX ISA 9.7.9 calls them performance hints: eviction priorities and the size of an L2 prefetch.
They are allowed on weak loads and stores with an explicit ``.global``, and the prefetch size also
on ``cp.async``: with a generic address that is not global the prefetch is undefined.  The cache
operators ``.ca``, ``.cg``, ``.cv``, ``.lu`` and ``.wt`` select where data are kept and how fresh
they are, so they belong to the instruction.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from nostall.ptx.safety.reading import pseudo_registers as state
from nostall.ptx.safety.reading.lexical import Unreadable, normalise
from nostall.ptx.safety.reading.opcodes import (
    FOOTPRINTS,
    LOADS,
    STORES,
    UNKNOWN,
    Effect,
    Rule,
    find_rule,
    touched_memory,
)
from nostall.ptx.safety.reading.scope import Name, Scope

_PREFETCH = frozenset({"L2::64B", "L2::128B", "L2::256B"})
_EVICTION = frozenset(
    {
        "L1::evict_normal",
        "L1::evict_unchanged",
        "L1::evict_first",
        "L1::evict_last",
        "L1::no_allocate",
        "L2::evict_normal",
        "L2::evict_first",
        "L2::evict_last",
    }
)
_STRONG = frozenset({"volatile", "relaxed", "acquire", "release", "mmio", "async", "bulk"})


def split_hints(opcode: str) -> tuple[str, str]:
    """(opcode without the hints that may differ, these hints joined by dots)."""
    if "L1::" not in opcode and "L2::" not in opcode:
        return opcode, ""
    root, *modifiers = opcode.split(".")
    allowed = _allowed_hints(root, frozenset(modifiers))
    kept = [m for m in modifiers if m not in allowed]
    hints = [m for m in modifiers if m in allowed]
    return ".".join((root, *kept)), ".".join(hints)


def _allowed_hints(root: str, modifiers: frozenset[str]) -> frozenset[str]:
    if root in ("ld", "st") and "global" in modifiers and not modifiers & _STRONG:
        return _PREFETCH | _EVICTION
    if root == "cp" and {"async", "global"} <= modifiers and "bulk" not in modifiers:
        return _PREFETCH
    return frozenset()


_CONSTANT = re.compile(
    r"""%(?:tid|ntid|laneid|nwarpid|ctaid|nctaid|nsmid|gridid|is_explicit_cluster|clusterid
    |nclusterid|cluster_ctaid|cluster_nctaid|cluster_ctarank|cluster_nctarank
    |lanemask_(?:eq|le|lt|ge|gt)|envreg\d+|reserved_smem_offset_(?:begin|end|cap|\d+)
    |total_smem_size|aggr_smem_size|dynamic_smem_size|current_graph_exec)""",
    re.VERBOSE,
)
_VOLATILE = re.compile(
    r"%(?:warpid|smid|clock|clock_hi|clock64|pm\d+(?:_64)?|globaltimer(?:_lo|_hi)?)"
)
"""Registers whose value may change while a thread runs."""


def is_special(name: str) -> bool:
    """Whether a name is that of a special register."""
    return (_CONSTANT.fullmatch(name) or _VOLATILE.fullmatch(name)) is not None


def is_volatile(name: str) -> bool:
    """Whether the register may change while a thread runs, so that reads of it keep their order."""
    return _VOLATILE.fullmatch(name) is not None


FOREIGN = -1
"""Number of an instruction that the original function does not have."""

_PARTS = re.compile(
    r"""(?:@\s*(?P<negated>!?)\s*(?P<guard>[\w$%]+)\s*)?
    (?P<opcode>[A-Za-z]\w*(?:\s*\.\w+(?:::\w+)*)*)(?P<operands>[^A-Za-z0-9_.:](?:.|\n)*)?;$""",
    re.VERBOSE,
)
_OPERAND_NAME = re.compile(r"(?<![\w$%.])([A-Za-z_$%][\w$]*)((?:\.[a-z]\w*)?)")
_VALID_OPERANDS = re.compile(r"[\w$%.,+\-*/()\[\]{}|!<>~&^?=]*")
_SPACE = re.compile(r"\s+")
_TORN_NAME = re.compile(r"[\w$%.]\s+[\w$%]")
_BUILT_IN = frozenset({"WARP_SZ", "_"})


class Instruction(NamedTuple):
    """One instruction; ``reads`` and ``writes`` include pseudo registers."""

    number: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    opcode: str
    """Opcode with its modifiers, hints included."""
    effect: Effect
    hints: str
    """Modifiers that may differ between original and candidate."""
    in_flight: frozenset[int]
    """Registers in use after the instruction, until a wait."""
    labels: frozenset[str]
    """Symbols of the labels among the operands."""
    inner: tuple[Instruction, ...] = ()
    """Of a compound instruction, those in its braces."""

    @property
    def ends_block(self) -> bool:
        """Whether control may continue at another place."""
        return self.effect is Effect.TERMINATOR


class Numbers:
    """Numbers of a function's instructions, by what distinguishes them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, ...], int] = {}
        self.is_frozen = False
        """Whether an instruction without a number is foreign; else it gets the next number."""

    def number(self, key: tuple[object, ...]) -> int:
        if self.is_frozen:
            return self._numbers.get(key, FOREIGN)
        return self._numbers.setdefault(key, len(self._numbers))


def decode(text: str, offset: int, scope: Scope, numbers: Numbers, prefix: str = "") -> Instruction:
    """Decode a statement; ``prefix`` is a pragma that belongs to it.

    Raises :class:`Unreadable` if a name is not declared in ``scope`` or the form is not PTX.
    """
    match = _PARTS.match(text)
    spaced = ((match["operands"] or "") if match else "").strip()
    operand_text = _SPACE.sub("", spaced)
    is_valid = _VALID_OPERANDS.fullmatch(operand_text) and not _TORN_NAME.search(spaced)
    if match is None or not is_valid:
        raise Unreadable(offset, f"{normalise(text)!r} is not an instruction")
    full_opcode = _SPACE.sub("", match["opcode"])
    opcode, hints = split_hints(full_opcode)
    rule = find_rule(opcode)
    operands = [_Operand(part, offset, scope) for part in _split(operand_text)]
    rule, written = _destinations(rule, operands)
    read_registers, written_registers = _registers(rule, operands, written)
    before, after = _footprint(rule, opcode, operands)
    writes = tuple(dict.fromkeys((*written_registers, *after)))
    reads = dict.fromkeys((*read_registers, *before))
    guard = ""
    if match["guard"] is not None:
        name = _resolve(match["guard"], offset, scope)
        guard = f"@{match['negated']}{name.symbol}"
        # A write that the guard may suppress leaves the old value.
        reads.update(dict.fromkeys((*([name.register] if name.register >= 0 else []), *writes)))
    key = (prefix, guard, opcode, *(operand.template for operand in operands))
    return Instruction(
        numbers.number(key),
        tuple(reads),
        writes,
        full_opcode,
        rule.effect,
        hints,
        _in_flight(rule, operands),
        frozenset(n.symbol for o in operands for n in o.names if n.space == "label"),
    )


class _Operand:
    """One operand: its names, and its text with each name's distinguishing symbol."""

    def __init__(self, text: str, offset: int, scope: Scope) -> None:
        self.text = text
        self.names: list[Name] = []
        self.registers: list[int] = []
        self.partial: list[int] = []
        """Registers of which only a part is named, such as ``%r1.b0`` or ``%v.x``."""
        self.is_volatile = False
        """Whether a special register is read whose value changes while a thread runs."""
        parts: list[str] = []
        end = 0
        for match in _OPERAND_NAME.finditer(text):
            parts += (text[end : match.start()], self._add(match[1], match[2], offset, scope))
            end = match.end()
        self.template = "".join((*parts, text[end:]))

    def _add(self, name: str, suffix: str, offset: int, scope: Scope) -> str:
        if name in _BUILT_IN:
            return name + suffix
        if scope.resolve(name) is None and is_special(name):
            self.is_volatile |= is_volatile(name)
            return name + suffix
        found = _resolve(name, offset, scope)
        self.names.append(found)
        if found.register >= 0:
            self.registers.append(found.register)
            if suffix or found.is_vector:
                self.partial.append(found.register)
        return found.symbol + suffix


def _resolve(name: str, offset: int, scope: Scope) -> Name:
    found = scope.resolve(name)
    if found is None:
        raise Unreadable(offset, f"{name} is not declared before this statement")
    return found


def _split(text: str) -> list[str]:
    """Operands of an instruction: parts between commas that no bracket encloses."""
    parts: list[str] = []
    depth = start = 0
    for position, character in enumerate(text):
        if character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and not depth:
            parts.append(text[start:position])
            start = position + 1
    if start < len(text):
        parts.append(text[start:])
    return parts


def _destinations(rule: Rule, operands: list[_Operand]) -> tuple[Rule, int]:
    """(rule, number of destinations), or the rule of unknown opcodes if the operands do not fit."""
    written = rule.writes
    if rule.may_omit and operands and operands[0].text.startswith("["):
        written = 0
    destinations = operands[:written]
    if len(destinations) < written or any(set(o.text) & set("[(") for o in destinations):
        return UNKNOWN, 0
    return rule, written


def _registers(rule: Rule, operands: list[_Operand], written: int) -> tuple[list[int], list[int]]:
    """Declared registers that the operands read, and those that they write."""
    if rule.effect is Effect.UNKNOWN:
        named = [r for operand in operands for r in operand.registers]
        return named, named
    destinations, sources = operands[:written], operands[written:]
    writes = [r for operand in destinations for r in operand.registers]
    reads = [r for operand in sources for r in operand.registers]
    kept = writes if rule.updates else [r for o in destinations for r in o.partial]
    return [*reads, *kept], writes


def _footprint(rule: Rule, opcode: str, operands: list[_Operand]) -> tuple[list[int], list[int]]:
    """Pseudo registers that an instruction reads, and those that it writes."""
    before, after = (list(part) for part in FOOTPRINTS[rule.effect])
    if rule.effect in LOADS | STORES:
        addresses = [o for o in operands if "[" in o.text]
        constant = (
            rule.effect in LOADS
            and bool(addresses)
            and all(o.names and all(n.space == "entry-param" for n in o.names) for o in addresses)
        )
        memory = touched_memory(opcode, constant)
        before += memory
        after += memory if rule.effect in STORES else ()
    if any(o.is_volatile for o in operands):
        ordered_before, ordered_after = FOOTPRINTS[Effect.ORDERED]
        before += ordered_before
        after += ordered_after
    if rule.signals:
        before.append(state.EXCHANGES)
        after.append(state.EXCHANGES)
    root, *modifiers = opcode.split(".")
    if root in ("addc", "subc", "madc"):
        before.append(state.CARRY)
    if "cc" in modifiers:
        after.append(state.CARRY)
    return before, after


def _in_flight(rule: Rule, operands: list[_Operand]) -> frozenset[int]:
    """Registers that stay in use after an asynchronous instruction."""
    if not rule.in_flight:
        return frozenset()
    chosen = [
        o
        for at, o in enumerate(operands)
        if not o.text.startswith("[")
        and (rule.in_flight == "values" or o.text.startswith("{") or at < rule.writes)
    ]
    return frozenset(r for o in chosen for r in o.registers)
