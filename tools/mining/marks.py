"""Register marks of instructions, learnt from a part of nvdisasm's listings.

``nvdisasm -lrm narrow`` needs 120 us for an instruction, without ``-lrm`` 17 us.  The marks depend
only on the *shape* of an instruction: its text with placeholders for register numbers and
immediates.  :class:`Marks` learns the marks of a shape from instructions that have them and derives
the marks of others.  A shape is learnt only from an instruction in which each mark belongs to
exactly one operand, and it is discarded if a later instruction disagrees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from nostall.sass.binary.listing import Register, Row
from nostall.sass.program.opcodes import Effect, Pipe, lookup

_REGISTER = re.compile(r"(?<![\w.$])(UR|UP|R|P)(\d+)(?![\w$])")
_NUMBER = re.compile(r"(?<![\w.])-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.])")
_LABEL = re.compile(r"`?\(.*\)$")
_SIGNS = str.maketrans("", "", "-~|!")
_UNLEARNABLE = frozenset(("CALL", "RET"))
"""Opcodes whose marks are those of other functions."""
_BRANCHES = frozenset(("BRA", "BSSY", "BSYNC", "EXIT"))
"""Opcodes that read all registers that they name and write none."""

_GAP = 2
"""Registers that the operands of a lesson are apart at least."""
_PLAIN_PIPES = (Pipe.INT, Pipe.FMA, Pipe.HALF)
_WIDE = frozenset(("WIDE", "HI", "64", "F64", "128", "X2"))

Template = tuple[tuple[int, int], ...]
"""(operand that names a register, offset from that register) of each mark."""


@dataclass(slots=True)
class Shape:
    """What is known of the instructions of one shape."""

    defs: Template | None = None
    uses: Template | None = None
    is_irregular: bool = False
    """Whether two instructions disagree, so that no template is right."""


@dataclass(slots=True)
class Marks:
    """The shapes of one architecture."""

    shapes: dict[str, Shape] = field(default_factory=dict[str, Shape])
    checked: int = 0
    """Instructions with marks that were compared with the template of their shape."""
    disagreements: int = 0

    def derive(self, text: str) -> tuple[tuple[Register, ...], tuple[Register, ...]] | None:
        """The registers that an instruction defines and uses; None if its shape is not learnt."""
        key, named = shape_of(text)
        if _base(text) in _BRANCHES:
            return (), named
        shape = self.shapes.get(key)
        if shape is None or shape.is_irregular or shape.defs is None or shape.uses is None:
            return None
        return _apply(shape.defs, named), _apply(shape.uses, named)

    def lesson(self, text: str) -> tuple[str, bool]:
        """(the shape of ``text``, whether ``text`` with marks would teach it)."""
        key, named = shape_of(text)
        shape = self.shapes.get(key)
        is_known = shape is not None and (shape.is_irregular or shape.defs is not None)
        is_clear = _are_apart(tuple(dict.fromkeys(named)))
        is_clear |= _is_plain(text) and not _has_neighbours(named)
        return key, not is_known and is_clear and not _ends_block(text)

    def learn(self, row: Row) -> None:
        """Learn from one instruction with marks, and check what was learnt."""
        key, named = shape_of(row.text)
        shape = self.shapes.setdefault(key, Shape())
        if shape.is_irregular:
            return
        if _base(row.text) in _UNLEARNABLE:
            shape.is_irregular = True
            return
        if shape.defs is None or shape.uses is None:
            shape.defs, shape.uses = _templates(row, named, _visible_uses(row, named))
            return
        self.checked += 1
        agrees = set(_apply(shape.defs, named)) == set(row.defs)
        if not agrees or set(_apply(shape.uses, named)) != set(_visible_uses(row, named)):
            self.disagreements += 1
            shape.is_irregular = True


def shape_of(text: str) -> tuple[str, tuple[Register, ...]]:
    """(the shape of an instruction, the registers that it names, in the order of the text)."""
    named = tuple((file, int(number)) for file, number in _REGISTER.findall(text))
    shape = _REGISTER.sub(r"\1#", text.replace(".reuse", ""))
    row = lookup(_base(text))
    if row is not None and row.pipe is not Pipe.TEXTURE:  # a texture mask gives the result's width
        shape = _LABEL.sub("(L)", _NUMBER.sub("0", shape)).translate(_SIGNS)
    return shape, named


def _base(text: str) -> str:
    """The mnemonic of an instruction, without modifiers."""
    words = text.split(None, 2)
    opcode = words[1] if words[0][0] == "@" and len(words) > 1 else words[0]
    return opcode.partition(".")[0]


def _ends_block(text: str) -> bool:
    """Whether an instruction makes sense only at its own place."""
    row = lookup(_base(text))
    return row is None or bool(row.effects & Effect.ENDS_BLOCK) or "`(" in text


def _are_apart(named: tuple[Register, ...]) -> bool:
    """Whether general registers of one file are so far apart that each mark has one owner."""
    by_file: dict[str, list[int]] = {}
    for file, number in named:
        if not file.endswith("P"):
            by_file.setdefault(file, []).append(number)
    for numbers in by_file.values():
        numbers.sort()
        if any(second - first < _GAP for first, second in pairwise(numbers)):
            return False
    return True


def _visible_uses(row: Row, named: tuple[Register, ...]) -> tuple[Register, ...]:
    """The registers that a row marks as used, without hidden descriptors.

    On some architectures nvdisasm marks the uniform registers of a memory descriptor that the text
    does not name.  Uses that are left out can only hide a sighting.
    """
    if "[" not in row.text:
        return row.uses
    return tuple(
        (file, number)
        for file, number in row.uses
        if file != "UR" or any(f == "UR" and 0 <= number - n <= 1 for f, n in named)
    )


def _templates(
    row: Row, named: tuple[Register, ...], used: tuple[Register, ...]
) -> tuple[Template | None, Template | None]:
    """(template of the defined registers, of the used ones); (None, None) if it is not certain."""
    results, sources = _owners(row, named)
    defs, uses = _template(row.defs, named, results), _template(used, named, sources)
    if defs is not None and uses is not None:
        return defs, uses
    if _is_plain(row.text) and not _has_neighbours(named):
        result = 1 if row.text.startswith("@") else 0
        defs = ((result, 0),)
        uses = tuple((at, 0) for at in range(len(named)) if at != result)
        if set(_apply(defs, named)) == set(row.defs) and set(_apply(uses, named)) == set(used):
            return defs, uses
    return None, None


def _has_neighbours(named: tuple[Register, ...]) -> bool:
    """Whether one operand may be the second word of another."""
    return any((file, number + 1) in named for file, number in named)


def _is_plain(text: str) -> bool:
    """Whether an instruction has one 32-bit result, its first operand, and 32-bit sources."""
    words = text.split(None, 2 if text.startswith("@") else 1)
    if len(words) < 2:
        return False
    base, *modifiers = words[-2].split(".")
    row, operands = lookup(base), words[-1]
    is_narrow = row is not None and row.pipe in _PLAIN_PIPES and not _WIDE & {*modifiers}
    has_one_result = operands.startswith("R") and not re.match(r"R\d+, P", operands)
    return is_narrow and has_one_result and base[0] != "U"


def _owners(row: Row, named: tuple[Register, ...]) -> tuple[list[bool], list[bool]]:
    """(whether each operand may be a result, whether it may be a source).

    A guard is only read.  If several operands name a register that the row defines, the first of
    them is the result and the others are sources, because results come first in the text.
    """
    has_guard = row.text.startswith("@")
    results, sources = [True] * len(named), [True] * len(named)
    for at, register in enumerate(named):
        is_guard = has_guard and at == 0
        is_first = register not in named[has_guard:at]
        is_repeated = named.count(register) > 1
        results[at] = not is_guard and is_first
        sources[at] = is_guard or not (is_repeated and is_first and register in row.defs)
    return results, sources


def _template(
    marked: tuple[Register, ...], named: tuple[Register, ...], owns: list[bool]
) -> Template | None:
    """The marks relative to the operands; None if a mark may belong to none or to several.

    ``owns``: the operands that may have a mark (:func:`_owners`).  The marks of an operand are a
    run of consecutive registers that begins at the named one; a predicate is one register.  The
    run of one operand must end before the register of the next one, and a register that several
    owners name must be alone.
    """
    owned = [register for register, is_owner in zip(named, owns, strict=True) if is_owner]
    template: list[tuple[int, int]] = []
    remaining = set(marked)
    for at, (file, start) in enumerate(named):
        if (file, start) not in marked or not owns[at]:
            continue
        if file.endswith("P") or owned.count((file, start)) > 1:
            if not file.endswith("P") and (file, start + 1) in marked:
                return None
            template.append((at, 0))
            remaining.discard((file, start))
            continue
        width = 0
        while (file, start + width) in remaining:
            if width and (file, start + width) in named:
                return None
            template.append((at, width))
            width += 1
        if width and (file, start + width) in named:
            return None
        remaining -= {(file, start + k) for k in range(width)}
    return tuple(template) if not remaining else None


def _apply(template: Template, named: tuple[Register, ...]) -> tuple[Register, ...]:
    """The registers of a template in an instruction that names the registers ``named``."""
    return tuple({(named[at][0], named[at][1] + offset): None for at, offset in template})
