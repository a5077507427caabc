"""A bounded reader of little-endian ELF64 files that remembers where every record lies.

It reads the parts of a cubin that a schedule can touch (sections, symbols, relocations) and
nothing else.  Every offset, size and index is checked against the file before it is used, so a
damaged file costs one clear :class:`~nostall.core.errors.BadBinary`, never memory or time.
Layout: ELF-64 Object File Format 1.5; values particular to CUDA are named below.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from nostall.core.errors import BadBinary

EM_CUDA = 190
MAX_BYTES = 1 << 29
MAX_SECTIONS = 1 << 16
MAX_NAME = 1 << 16

SHT_SYMTAB, SHT_RELA, SHT_NOBITS, SHT_REL = 2, 4, 8, 9
SHT_CUDA_INFO = 0x70000000
STT_FUNC = 2
STO_CUDA_ENTRY = 0x10

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = {SHT_REL: struct.Struct("<QQ"), SHT_RELA: struct.Struct("<QQq")}
_TABLES = frozenset((SHT_SYMTAB, SHT_REL, SHT_RELA, SHT_CUDA_INFO))


@dataclass(frozen=True, slots=True)
class Section:
    """One section header; ``offset`` and ``size`` are in bytes, inside the file."""

    index: int
    name: str
    type: int
    flags: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """One symbol; ``value`` and ``size`` are bytes within its section."""

    name: str
    type: int
    other: int
    section: int
    value: int
    size: int


@dataclass(frozen=True, slots=True)
class Relocation:
    """A patch the loader makes: ``offset`` is in the target section, ``at`` in the file."""

    at: int
    target: int
    offset: int
    type: int


@dataclass(frozen=True, slots=True)
class Elf:
    """The tables of one ELF file."""

    data: bytes
    os_abi: int
    abi_version: int
    flags: int
    sections: tuple[Section, ...]

    @classmethod
    def parse(cls, data: bytes) -> Elf:
        """Read the header and the section table.

        Raises :class:`BadBinary` for anything that is not a complete little-endian ELF64 file
        for CUDA (``e_machine`` 190).
        """
        if len(data) > MAX_BYTES:
            raise BadBinary(f"the file has {len(data)} bytes; at most {MAX_BYTES} are read")
        if data[:4] != b"\x7fELF":
            raise BadBinary(
                f"not an ELF file (it begins with {data[:4]!r}); give a cubin, for example from "
                "`nvcc -cubin` or Triton's cache"
            )
        if len(data) < _HEADER.size:
            raise BadBinary(f"truncated: {len(data)} bytes, an ELF64 header has {_HEADER.size}")
        ident, _, machine, _, _, _, shoff, flags, _, _, _, shentsize, shnum, shstrndx = (
            _HEADER.unpack_from(data)
        )
        if ident[4] != 2 or ident[5] != 1:
            raise BadBinary(
                f"ELF class {ident[4]}, byte order {ident[5]}; cubins are 64-bit (2), "
                "little-endian (1)"
            )
        if machine != EM_CUDA:
            raise BadBinary(
                f"ELF for machine {machine}, not CUDA ({EM_CUDA}); give a cubin for an NVIDIA GPU"
            )
        if shentsize != _SECTION.size:
            raise BadBinary(f"section headers of {shentsize} bytes; ELF64 has {_SECTION.size}")
        if not 0 < shnum < MAX_SECTIONS or shoff + shnum * _SECTION.size > len(data):
            raise BadBinary(
                f"truncated: {shnum} section headers at byte {shoff} do not fit into "
                f"{len(data)} bytes"
            )
        if shstrndx >= shnum:
            raise BadBinary(f"section-name table has index {shstrndx} of {shnum} sections")
        raw = [_SECTION.unpack_from(data, shoff + i * _SECTION.size) for i in range(shnum)]
        sections = tuple(_sections(data, raw, shstrndx))
        _require_disjoint(sections, shoff)
        return cls(data, ident[7], ident[8], flags, sections)

    def content(self, section: Section) -> bytes:
        """The section's bytes (empty for NOBITS)."""
        if section.type == SHT_NOBITS:
            return b""
        return self.data[section.offset : section.offset + section.size]

    def symbols(self) -> tuple[Symbol, ...]:
        """All symbols of all symbol tables."""
        found: list[Symbol] = []
        for table in self.sections:
            if table.type != SHT_SYMTAB:
                continue
            names = _Strings(self._linked(table, "string table"))
            raw = self.content(table)
            for i in range(len(raw) // _SYMBOL.size):
                name, info, other, index, value, size = _SYMBOL.unpack_from(raw, i * _SYMBOL.size)
                found.append(Symbol(names.at(name, "symbol"), info & 15, other, index, value, size))
        return tuple(found)

    def relocations(self) -> tuple[Relocation, ...]:
        """All relocations of all REL and RELA sections, with their place in the file."""
        found: list[Relocation] = []
        for table in self.sections:
            layout = _RELOCATION.get(table.type)
            if layout is None:
                continue
            raw = self.content(table)
            for i in range(len(raw) // layout.size):
                offset, info = layout.unpack_from(raw, i * layout.size)[:2]
                at = table.offset + i * layout.size
                found.append(Relocation(at, table.info, offset, info & 0xFFFFFFFF))
        return tuple(found)

    def _linked(self, section: Section, what: str) -> bytes:
        if section.link >= len(self.sections):
            raise BadBinary(
                f"section {section.name!r} names section {section.link} as its {what}; there are "
                f"{len(self.sections)}"
            )
        return self.content(self.sections[section.link])


def _sections(data: bytes, raw: list[tuple[int, ...]], names_index: int) -> list[Section]:
    names_type, names_offset, names_size = (raw[names_index][i] for i in (1, 4, 5))
    if names_type == SHT_NOBITS or names_offset + names_size > len(data):
        raise BadBinary("the section-name table does not lie inside the file")
    names = _Strings(data[names_offset : names_offset + names_size])
    found: list[Section] = []
    for index, (name, kind, flags, _, offset, size, link, info, _, _) in enumerate(raw):
        text = names.at(name, f"section {index}")
        if kind != SHT_NOBITS and offset + size > len(data):
            raise BadBinary(
                f"section {text!r} claims bytes {offset}..{offset + size} of a file of "
                f"{len(data)}; the file is truncated or damaged"
            )
        found.append(Section(index, text, kind, flags, offset, size, link, info))
    return found


def _require_disjoint(sections: tuple[Section, ...], table_at: int) -> None:
    """What is read or written must not overlap: then all work is linear in the file's size."""
    ranges = [
        (0, _HEADER.size, "the ELF header"),
        (table_at, table_at + len(sections) * _SECTION.size, "the section table"),
    ]
    ranges += [
        (s.offset, s.offset + s.size, f"section {s.name!r}")
        for s in sections
        if s.size and s.type != SHT_NOBITS and (s.type in _TABLES or s.name.startswith(".text."))
    ]
    ranges.sort()
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise BadBinary(
                f"{second} begins at byte {start}, inside {first}, which ends at {end}; the file "
                "is damaged"
            )


class _Strings:
    """A string table; together its names may not be longer than names that share nothing."""

    def __init__(self, table: bytes) -> None:
        self.table = table
        self.known: dict[int, str] = {}
        self.left = 4 * len(table) + MAX_NAME

    def at(self, offset: int, what: str) -> str:
        """The NUL-terminated name at ``offset``."""
        name = self.known.get(offset)
        if name is None:
            end = self.table.find(b"\0", offset)
            if offset > len(self.table) or (end < 0 and self.table):
                raise BadBinary(f"the name of a {what} lies outside its string table (at {offset})")
            self.left -= max(0, end - offset)
            if end - offset > MAX_NAME or self.left < 0:
                raise BadBinary(
                    f"the name of a {what} has {end - offset} bytes or overlaps too many others; "
                    "the string table is damaged"
                )
            name = self.table[offset:end].decode("utf-8", "replace")
            self.known[offset] = name
        return name
