"""Instruction offsets that a cubin records outside its text: ``.nv.info`` and relocations.

An instruction whose offset is recorded may move only together with its record.  Records whose
layout is known yield the exact file positions of their offsets; from any other record every
value that could be an instruction offset is *pinned*: that instruction must stay where it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from nostall.core.errors import BadBinary
from nostall.sass.binary.elf import Elf, Section
from nostall.sass.binary.encoding import WORD_BYTES

_NVAL, _BVAL, _HVAL, _SVAL = 1, 2, 3, 4

OFFSET_LISTS = {
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

MBARRIER_OFFSETS = 0x39
"""Records of four u32: offset, register, mbarrier offset, kind."""

INDIRECT_BRANCH_TARGETS = 0x34
"""Records of u32: offset of the branch, 0, count, then count target offsets."""

NO_OFFSETS = frozenset(
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
    """One ``.nv.info`` entry; ``at`` is the file position of its payload."""

    code: int
    format: int
    at: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class OffsetRecord:
    """A value of ``width`` bytes at file position ``at`` that holds ``offset`` into the text.

    Attributes name an instruction, relocations a byte inside one.  ``fixed`` records name a
    target (a label), which never moves.
    """

    at: int
    offset: int
    width: int
    source: str
    fixed: bool = False


def attributes(elf: Elf, section: Section) -> Iterator[Attribute]:
    """Parse one ``.nv.info*`` section."""
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
    """The offsets that one function's ``.nv.info`` section records, and the offsets it pins."""
    records: list[OffsetRecord] = []
    pinned: set[int] = set()
    for entry in attributes(elf, info):
        if entry.format != _SVAL or entry.code in NO_OFFSETS:
            continue
        known = _known_layout(entry, text_size)
        if known is None:
            pinned.update(_possible_offsets(entry.payload, text_size))
        else:
            records.extend(known)
    return records, pinned


def _known_layout(entry: Attribute, text_size: int) -> list[OffsetRecord] | None:
    """The records of an attribute, or None when its bytes do not follow a known layout."""
    words = [w for (w,) in struct.iter_unpack("<I", entry.payload[: len(entry.payload) // 4 * 4])]
    if len(entry.payload) % 4:
        return None
    name = OFFSET_LISTS.get(entry.code)
    if name is not None:
        places = [(i, False) for i in range(len(words))]
    elif entry.code == MBARRIER_OFFSETS and len(words) % 4 == 0:
        name, places = "MBARRIER_INSTR_OFFSETS", [(i, False) for i in range(0, len(words), 4)]
    elif entry.code == INDIRECT_BRANCH_TARGETS:
        name, found = "INDIRECT_BRANCH_TARGETS", _branch_places(words)
        if found is None:
            return None
        places = found
    else:
        return None
    if any(words[i] % WORD_BYTES or words[i] >= text_size for i, _ in places):
        return None
    return [OffsetRecord(entry.at + 4 * i, words[i], 4, name, fixed) for i, fixed in places]


def _branch_places(words: list[int]) -> list[tuple[int, bool]] | None:
    places: list[tuple[int, bool]] = []
    at = 0
    while at < len(words):
        if at + 3 > len(words) or words[at + 1] != 0 or at + 3 + words[at + 2] > len(words):
            return None
        places.append((at, False))
        places.extend((at + 3 + i, True) for i in range(words[at + 2]))
        at += 3 + words[at + 2]
    return places


def _possible_offsets(payload: bytes, text_size: int) -> set[int]:
    whole = payload[: len(payload) // 4 * 4]
    return {
        word
        for (word,) in struct.iter_unpack("<I", whole)
        if word % WORD_BYTES == 0 and word < text_size
    }
