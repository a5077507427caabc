"""Instruction offsets that a cubin records outside its machine code, in ``.nv.info`` sections.

If an instruction moves, every recorded offset that names it must be rewritten.  For an attribute
with a known layout the parser returns the file position of each offset.  For any other attribute
each value that could be an instruction offset is *pinned*: that instruction must not move.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from nostall.core.errors import BadBinary
from nostall.sass.binary.elf import Elf, Section
from nostall.sass.binary.encoding import WORD_BYTES

_NVAL, _BVAL, _HVAL, _SVAL = 1, 2, 3, 4
"""Formats of an attribute's value: none, one byte, two bytes, or a payload of the given size."""

OFFSET_LIST_ATTRIBUTES = {
    0x1C: "EXIT_INSTR_OFFSETS",
    0x1D: "S2RCTAID_INSTR_OFFSETS",
    0x25: "LD_CACHEMOD_INSTR_OFFSETS",
    0x27: "ATOM_SYS_INSTR_OFFSETS",
    0x28: "COOP_GROUP_INSTR_OFFSETS",
    0x2D: "ATOMF16_EMUL_INSTR_OFFSETS",
    0x31: "INT_WARP_WIDE_INSTR_OFFSETS",
    0x46: "SYSCALL_OFFSETS",
    0x47: "SW_WAR_MEMBAR_SYS_INSTR_OFFSETS",
}
"""Attributes whose payload is a plain list of u32 byte offsets."""

MBARRIER_INSTR_OFFSETS = 0x39
"""Attribute with records of four u32: offset, register, mbarrier offset, kind."""

INDIRECT_BRANCH_TARGETS = 0x34
"""Attribute with records of u32: offset of the branch, 0, count, then ``count`` target offsets."""

ATTRIBUTES_WITHOUT_OFFSETS = frozenset(
    (
        *range(0x01, 0x1C),
        *(0x1E, 0x1F, 0x20, 0x21, 0x22, 0x23, 0x24, 0x26, 0x29, 0x2A, 0x2B, 0x2C, 0x2F, 0x30),
        *(0x32, 0x33, 0x35, 0x36, 0x37, 0x38, 0x3B, 0x3C, 0x3D, 0x3E, 0x3F, 0x41, 0x42, 0x43),
        *(0x45, 0x48, 0x49, 0x4A, 0x4B, 0x4C, 0x4D, 0x4E, 0x4F, 0x50, 0x51, 0x52, 0x53, 0x54),
        *(0x55, 0x58, 0x5A, 0x5B, 0x5F),
    )
)
"""Attributes that hold sizes, counts, register or symbol numbers, but no instruction offset."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """One entry of a ``.nv.info`` section."""

    code: int
    """EIATTR number."""
    format: int
    """1 to 4, see ``_NVAL`` to ``_SVAL``."""
    file_offset: int
    """File position of the payload, in bytes."""
    payload: bytes
    """Empty unless the format is ``_SVAL``."""


@dataclass(frozen=True, slots=True)
class OffsetRecord:
    """A value in the cubin that holds a byte offset into the machine code of one function."""

    file_offset: int
    """File position of the value, in bytes."""
    offset: int
    """The value: of an instruction (attributes) or of a byte inside one (relocations)."""
    width: int
    """Size of the value in bytes."""
    source: str
    """Name of the attribute, or ``relocation TYPE``."""
    is_branch_target: bool = False
    """Whether the value names a branch target.  A target is a position and never moves."""


def parse_attributes(elf: Elf, section: Section) -> Iterator[Attribute]:
    """Parse one ``.nv.info*`` section; raises :class:`BadBinary` if it is damaged."""
    data, at = elf.content(section), 0
    while at < len(data):
        if at + 4 > len(data):
            raise BadBinary(f"section {section.name!r} ends inside an attribute at byte {at}")
        kind, code, size = struct.unpack_from("<BBH", data, at)
        at += 4
        length = size if kind == _SVAL else 0
        if kind not in (_NVAL, _BVAL, _HVAL, _SVAL) or at + length > len(data):
            raise BadBinary(
                f"section {section.name!r} has a damaged attribute (format {kind}, size {size}) "
                f"at byte {at - 4}"
            )
        yield Attribute(code, kind, section.offset + at, data[at : at + length])
        at += length


def offset_records(elf: Elf, info: Section, text_size: int) -> tuple[list[OffsetRecord], set[int]]:
    """Read the offsets in one function's ``.nv.info`` section: (records, pinned offsets).

    ``text_size`` is the size of the function's machine code in bytes.
    """
    records: list[OffsetRecord] = []
    pinned: set[int] = set()
    for attribute in parse_attributes(elf, info):
        if attribute.format != _SVAL or attribute.code in ATTRIBUTES_WITHOUT_OFFSETS:
            continue
        parsed = _parse_records(attribute, text_size)
        if parsed is None:
            pinned.update(_possible_offsets(attribute.payload, text_size))
        else:
            records.extend(parsed)
    return records, pinned


def _parse_records(attribute: Attribute, text_size: int) -> list[OffsetRecord] | None:
    """The records of an attribute, or None if its bytes do not follow a known layout."""
    payload = attribute.payload
    words = [w for (w,) in struct.iter_unpack("<I", payload[: len(payload) // 4 * 4])]
    if len(payload) % 4:
        return None
    positions: list[tuple[int, bool]] | None  # (number of the u32, whether it is a branch target)
    name = OFFSET_LIST_ATTRIBUTES.get(attribute.code)
    if name is not None:
        positions = [(i, False) for i in range(len(words))]
    elif attribute.code == MBARRIER_INSTR_OFFSETS and len(words) % 4 == 0:
        name = "MBARRIER_INSTR_OFFSETS"
        positions = [(i, False) for i in range(0, len(words), 4)]
    elif attribute.code == INDIRECT_BRANCH_TARGETS:
        name, positions = "INDIRECT_BRANCH_TARGETS", _indirect_branch_positions(words)
    else:
        return None
    if positions is None:
        return None
    if any(words[i] % WORD_BYTES or words[i] >= text_size for i, _ in positions):
        return None
    return [
        OffsetRecord(attribute.file_offset + 4 * i, words[i], 4, name, is_target)
        for i, is_target in positions
    ]


def _indirect_branch_positions(words: list[int]) -> list[tuple[int, bool]] | None:
    """Positions of offsets in INDIRECT_BRANCH_TARGETS, or None if the words do not fit it."""
    positions: list[tuple[int, bool]] = []
    at = 0
    while at < len(words):
        if at + 3 > len(words) or words[at + 1] != 0 or at + 3 + words[at + 2] > len(words):
            return None
        positions.append((at, False))
        positions.extend((at + 3 + i, True) for i in range(words[at + 2]))
        at += 3 + words[at + 2]
    return positions


def _possible_offsets(payload: bytes, text_size: int) -> set[int]:
    """All u32 values of a payload that could be the offset of an instruction."""
    complete_words = payload[: len(payload) // 4 * 4]
    return {
        word
        for (word,) in struct.iter_unpack("<I", complete_words)
        if word % WORD_BYTES == 0 and word < text_size
    }
