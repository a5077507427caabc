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

from nostall.sass.binary.listing import Register, Row
from nostall.sass.program.opcodes import Pipe, lookup

_REGISTER = re.compile(r"(?<![\w.$])(UR|UP|R|P)(\d+)(?![\w$])")
_NUMBER = re.compile(r"(?<![\w.])-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?![\w.])")
_LABEL = re.compile(r"`?\(.*\)$")
_SIGNS = str.maketrans("", "", "-~|!")
_UNLEARNABLE = frozenset(("CALL", "RET"))
"""Opcodes whose marks are those of other functions."""

MAX_ATTEMPTS = 24
"""Instructions of a shape that may teach nothing before the shape is given up."""

Template = tuple[tuple[int, int], ...]
"""(operand that names a register, offset from that register) of each mark."""


@dataclass(slots=True)
class Shape:
    """What is known of the instructions of one shape."""

    defs: Template | None = None
    uses: Template | None = None
    is_irregular: bool = False
    """Whether two instructions disagree, so that no template is right."""
    attempts: int = 0
    """Instructions that taught nothing."""


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
        shape = self.shapes.get(key)
        if shape is None or shape.is_irregular or shape.defs is None or shape.uses is None:
            return None
        return _apply(shape.defs, named), _apply(shape.uses, named)

    def is_worth_learning(self, text: str) -> bool:
        """Whether an instruction with marks could still teach the shape of ``text``."""
        key, named = shape_of(text)
        shape = self.shapes.get(key)
        if shape is None:
            return True
        return shape.defs is None and not shape.is_irregular and shape.attempts < MAX_ATTEMPTS

    def learn(self, row: Row) -> None:
        """Learn from one instruction with marks, and check what was learnt."""
        key, named = shape_of(row.text)
        shape = self.shapes.setdefault(key, Shape())
        if shape.is_irregular:
            return
        if row.text.partition(" ")[0].partition(".")[0] in _UNLEARNABLE:
            shape.is_irregular = True
            return
        if shape.defs is None or shape.uses is None:
            defs, uses = _template(row.defs, named), _template(row.uses, named)
            if defs is not None and uses is not None:
                shape.defs, shape.uses = defs, uses
            shape.attempts += 1
            return
        self.checked += 1
        agrees = set(_apply(shape.defs, named)) == set(row.defs)
        if not agrees or set(_apply(shape.uses, named)) != set(row.uses):
            self.disagreements += 1
            shape.is_irregular = True


def shape_of(text: str) -> tuple[str, tuple[Register, ...]]:
    """(the shape of an instruction, the registers that it names, in the order of the text)."""
    named = tuple((file, int(number)) for file, number in _REGISTER.findall(text))
    shape = _REGISTER.sub(r"\1#", text.replace(".reuse", ""))
    words = shape.split(None, 2)
    opcode = words[1] if words[0][0] == "@" and len(words) > 1 else words[0]
    row = lookup(opcode.partition(".")[0])
    if row is not None and row.pipe is not Pipe.TEXTURE:  # a texture mask gives the result's width
        shape = _LABEL.sub("(L)", _NUMBER.sub("0", shape)).translate(_SIGNS)
    return shape, named


def _template(marked: tuple[Register, ...], named: tuple[Register, ...]) -> Template | None:
    """The marks relative to the operands; None if a mark may belong to none or to several.

    The marks of an operand are a run of consecutive registers that begins at the named one.  The
    run of one operand must end before the register of the next one.
    """
    template: list[tuple[int, int]] = []
    remaining = set(marked)
    if len(set(named)) < len(named):
        return None
    for at, (file, start) in enumerate(named):
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
