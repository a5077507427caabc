"""Conversions of integers to f16 by way of f32: the same result for every integer.

``cvt.rn.f16.s32`` runs on the slow unit for special functions; ``cvt.rn.f32.s32`` and
``cvt.rn.f16.f32`` do not on recent GPUs.  Both ways round once: an f32 holds each integer up to
2**24 in magnitude, so for these only the second step rounds.  Larger ones, and their f32, are
beyond 65520, from which on f16 rounds to infinity.  bf16 has the range of f32, so this does not
hold for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nostall.ptx.program.instruction import Instruction
from nostall.ptx.program.module import Function
from nostall.ptx.schedule.edits import Edit

CONVERTED = ("cvt.rn.f16.s32", "cvt.rn.f16.u32")
_OPERANDS = re.compile(r"\s+(%[\w$]+)\s*,\s*(%[\w$]+)\s*;")
_LOCAL = "%nostall_f32"
"""Declared inside braces, so that it is another register in each of them."""


def convertible(kernel: Function, text: str) -> Iterator[tuple[Instruction, str, str]]:
    """The conversions of a kernel that may go through f32, each with its two operands."""
    for instruction in kernel.instructions:
        start, end = instruction.opcode_span
        found = _OPERANDS.fullmatch(text, end, instruction.end)
        if (
            found is not None
            and instruction.opcode in CONVERTED
            and text[start:end] == instruction.opcode
            and instruction.start == start  # no guard
            and _LOCAL not in kernel.words
        ):
            yield instruction, found[1], found[2]


def conversion_edits(kernel: Function, text: str) -> list[Edit]:
    """Edits that let each conversion of ``kernel`` go through f32; ``text`` is the module's."""
    return [
        Edit(
            instruction.start,
            instruction.end,
            f"{{ .reg .f32 {_LOCAL}; cvt.rn.f32.{instruction.qualifiers[-1]} {_LOCAL}, {source}; "
            f"cvt.rn.f16.f32 {target}, {_LOCAL}; }}",
        )
        for instruction, target, source in convertible(kernel, text)
    ]
