"""Address operands of shared-memory loads: registers, constant offset and width."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from nostall.sass.program.instruction import Instruction

_CONSTANT = re.compile(r"-?0x[0-9a-f]+$")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
_WORD_BYTES = 4


class Address(NamedTuple):
    """The bytes that a load reads, relative to the values of its address registers."""

    base: str
    """The address without its constant: registers with their modifiers, such as ``R2.X4+UR4``."""
    offset: int
    """The constant in bytes."""
    width: int
    """Number of bytes that each thread reads."""

    @property
    def bytes(self) -> range:
        """The offsets of the bytes from the base."""
        return range(self.offset, self.offset + self.width)


def reads_shared_in_order(instruction: Instruction) -> bool:
    """Whether the load may be one that the memory model orders with other reads.

    ``ld.relaxed`` and ``ld.volatile`` of shared memory compile to a plain LDS: no modifier
    distinguishes them from weak loads.  LDSM is not meant, because ``ldmatrix`` has only weak
    forms, and the relaxed and volatile generic loads compile to ``LD.STRONG``, a fence.
    """
    return instruction.base == "LDS" and not instruction.is_barrier


def shared_address(instruction: Instruction) -> Address:
    """The address of an LDS."""
    return _parse(instruction.operands, instruction.modifiers)


@lru_cache(1 << 12)
def _parse(operands: tuple[str, ...], modifiers: frozenset[str]) -> Address:
    text = next((o for o in operands if o.startswith("[")), "[?]").strip("[]")
    registers: list[str] = []
    offset = 0
    for part in text.split("+"):
        if _CONSTANT.match(part):
            offset += int(part, 16)
        elif part not in ("RZ", "URZ"):
            registers.append(part)
    width = next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), _WORD_BYTES)
    return Address("+".join(registers), offset, width)
