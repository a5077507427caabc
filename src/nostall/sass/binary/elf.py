"""Bounded reader of little-endian ELF64 files: sections, symbols, relocations, file positions.

The reader checks every offset, size and index against the file before it uses it.  A damaged file
therefore raises :class:`~nostall.core.errors.BadBinary` and never costs much memory or time.
Layout: ELF-64 Object File Format 1.5, with the CUDA constants below.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise

from nostall.core.errors import BadBinary

EM_CUDA = 190
"""``e_machine`` of a cubin."""
MAX_BYTES = 1 << 29
"""Size of the largest file that is read."""
MAX_SECTIONS = 1 << 16
MAX_NAME = 1 << 16
"""Bytes of the longest symbol or section name."""

SHT_NULL, SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB = 0, 1, 2, 3
SHT_RELA, SHT_NOBITS, SHT_REL = 4, 8, 9
SHT_CUDA_INFO = 0x70000000
SHT_CUDA_SHARED = 0x7000000A
WITHOUT_BYTES = frozenset((SHT_NOBITS, SHT_CUDA_SHARED))
"""Types of sections that have a size, but no bytes in the file (``.nv_debug.shared``)."""
STT_FUNC = 2
STO_CUDA_ENTRY = 0x10
"""Bit of ``st_other`` that marks an entry kernel."""

ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
ELF_SYMBOL = struct.Struct("<IBBHQQ")
RELOCATION = {SHT_REL: struct.Struct("<QQ"), SHT_RELA: struct.Struct("<QQq")}
_PARSED_TYPES = frozenset((SHT_SYMTAB, SHT_REL, SHT_RELA, SHT_CUDA_INFO))


@dataclass(frozen=True, slots=True)
class Section:
    """One section header; ``offset`` (file position) and ``size`` are in bytes."""

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
    """One symbol; ``value`` (offset in its section) and ``size`` are in bytes.

    ``section`` is the index of its section, ``other`` the field ``st_other``.  A *local* symbol is
    known in one of the linked files only.
    """

    name: str
    type: int
    other: int
    section: int
    value: int
    size: int
    is_local: bool


@dataclass(frozen=True, slots=True)
class Relocation:
    """One relocation: bytes that the loader patches."""

    file_offset: int
    """File position of the relocation entry, whose first 8 bytes are ``offset``."""
    target: int
    """Index of the section that is patched."""
    offset: int
    """Offset of the patched bytes in the target section."""
    type: int
    """R_CUDA relocation type."""


@dataclass(frozen=True, slots=True)
class Elf:
    """One parsed ELF file; ``os_abi`` and ``abi_version`` are bytes 7 and 8 of ``e_ident``."""

    data: bytes
    os_abi: int
    abi_version: int
    flags: int
    sections: tuple[Section, ...]

    @classmethod
    def parse(cls, data: bytes) -> Elf:
        """Read the header and the section table.

        Raises :class:`BadBinary` if ``data`` is not a complete little-endian ELF64 file for CUDA
        (``e_machine`` 190).
        """
        if len(data) > MAX_BYTES:
            raise BadBinary(f"the file has {len(data)} bytes; at most {MAX_BYTES} are allowed")
        if data[:4] != b"\x7fELF":
            raise BadBinary(
                f"not an ELF file (it begins with {data[:4]!r}); give a cubin, for example from "
                "`nvcc -cubin` or Triton's cache"
            )
        if len(data) < ELF_HEADER.size:
            raise BadBinary(f"truncated: {len(data)} bytes; an ELF64 header has {ELF_HEADER.size}")
        ident, _, machine, _, _, phoff, shoff, flags, _, phentsize, phnum, *section_table = (
            ELF_HEADER.unpack_from(data)
        )
        shentsize, shnum, shstrndx = section_table
        if ident[4] != 2 or ident[5] != 1:
            raise BadBinary(
                f"ELF class {ident[4]}, byte order {ident[5]}; cubins are 64-bit (2), "
                "little-endian (1)"
            )
        if machine != EM_CUDA:
            raise BadBinary(
                f"ELF for machine {machine}, not CUDA ({EM_CUDA}); give a cubin for an NVIDIA GPU"
            )
        if shentsize != ELF_SECTION.size:
            raise BadBinary(f"section headers of {shentsize} bytes; ELF64 has {ELF_SECTION.size}")
        if not 0 < shnum < MAX_SECTIONS or shoff + shnum * ELF_SECTION.size > len(data):
            raise BadBinary(
                f"truncated: {shnum} section headers at byte {shoff} do not fit into "
                f"{len(data)} bytes"
            )
        if phoff + phnum * phentsize > len(data):
            raise BadBinary(
                f"truncated: {phnum} program headers at byte {phoff} do not fit into "
                f"{len(data)} bytes"
            )
        if shstrndx >= shnum:
            raise BadBinary(f"section-name table has index {shstrndx} of {shnum} sections")
        raw = [ELF_SECTION.unpack_from(data, shoff + i * ELF_SECTION.size) for i in range(shnum)]
        sections = tuple(_sections(data, raw, shstrndx))
        _require_disjoint(sections, shoff)
        return cls(data, ident[7], ident[8], flags, sections)

    def content(self, section: Section) -> bytes:
        """The bytes of a section (none for the types ``WITHOUT_BYTES``)."""
        if section.type in WITHOUT_BYTES:
            return b""
        return self.data[section.offset : section.offset + section.size]

    def raw_header(self, index: int) -> tuple[int, ...]:
        """The ten fields of a section header, in the layout ``ELF_SECTION``."""
        (table_at,) = struct.unpack_from("<Q", self.data, 0x28)
        return ELF_SECTION.unpack_from(self.data, table_at + index * ELF_SECTION.size)

    def symbols(self) -> tuple[Symbol, ...]:
        """All symbols of all symbol tables."""
        symbols: list[Symbol] = []
        for table in self.sections:
            if table.type != SHT_SYMTAB:
                continue
            names = _StringTable(self._linked_content(table, "string table"))
            raw = self.content(table)
            for i in range(len(raw) // ELF_SYMBOL.size):
                name, info, other, index, value, size = ELF_SYMBOL.unpack_from(
                    raw, i * ELF_SYMBOL.size
                )
                text = names.name(name, "symbol")
                symbols.append(Symbol(text, info & 15, other, index, value, size, info < 16))
        return tuple(symbols)

    def relocations(self) -> tuple[Relocation, ...]:
        """All relocations of all REL and RELA sections."""
        relocations: list[Relocation] = []
        for table in self.sections:
            layout = RELOCATION.get(table.type)
            if layout is None:
                continue
            raw = self.content(table)
            for i in range(len(raw) // layout.size):
                offset, info = layout.unpack_from(raw, i * layout.size)[:2]
                at = table.offset + i * layout.size
                relocations.append(Relocation(at, table.info, offset, info & 0xFFFFFFFF))
        return tuple(relocations)

    def _linked_content(self, section: Section, role: str) -> bytes:
        """The bytes of the section that ``sh_link`` names; ``role`` is for the error text."""
        if section.link >= len(self.sections):
            raise BadBinary(
                f"section {section.name!r} names section {section.link} as its {role}, but the "
                f"file has {len(self.sections)} sections; it is damaged"
            )
        return self.content(self.sections[section.link])


def _sections(data: bytes, raw: list[tuple[int, ...]], names_index: int) -> list[Section]:
    """Sections from their unpacked headers; ``names_index`` is the section of their names."""
    names_type, names_offset, names_size = (raw[names_index][i] for i in (1, 4, 5))
    if names_type in WITHOUT_BYTES or names_offset + names_size > len(data):
        raise BadBinary("the section-name table does not lie inside the file")
    names = _StringTable(data[names_offset : names_offset + names_size])
    sections: list[Section] = []
    for index, (name, kind, flags, _, offset, size, link, info, _, _) in enumerate(raw):
        text = names.name(name, f"section {index}")
        if kind not in WITHOUT_BYTES and offset + size > len(data):
            raise BadBinary(
                f"section {text!r} claims bytes {offset}..{offset + size} of a file of "
                f"{len(data)}; the file is truncated or damaged"
            )
        sections.append(Section(index, text, kind, flags, offset, size, link, info))
    return sections


def _require_disjoint(sections: tuple[Section, ...], table_at: int) -> None:
    """Raise BadBinary if two parts of the file that are read or written overlap.

    Without overlaps all work is linear in the size of the file.
    """
    ranges = [
        (0, ELF_HEADER.size, "the ELF header"),
        (table_at, table_at + len(sections) * ELF_SECTION.size, "the section table"),
    ]
    ranges += [
        (s.offset, s.offset + s.size, f"section {s.name!r}")
        for s in sections
        if s.size
        and s.type not in WITHOUT_BYTES
        and (s.type in _PARSED_TYPES or s.name.startswith(".text."))
    ]
    ranges.sort()
    for (_, end, first), (start, _, second) in pairwise(ranges):
        if start < end:
            raise BadBinary(
                f"{second} begins at byte {start}, inside {first}, which ends at {end}; the file "
                "is damaged"
            )


class _StringTable:
    """Names of a string table.

    The names read may together have four times the bytes of the table plus ``MAX_NAME``.  Names
    that share their ends could otherwise need memory quadratic in the size of the table.
    """

    def __init__(self, table: bytes) -> None:
        self._table = table
        self._cache: dict[int, str] = {}
        self._remaining = 4 * len(table) + MAX_NAME

    def name(self, offset: int, owner: str) -> str:
        """The NUL-terminated name at ``offset``; ``owner`` is for the error text."""
        name = self._cache.get(offset)
        if name is None:
            end = self._table.find(b"\0", offset)
            if offset > len(self._table) or (end < 0 and self._table):
                raise BadBinary(
                    f"the name of a {owner} lies outside its string table (at {offset}); the file "
                    "is damaged"
                )
            self._remaining -= max(0, end - offset)
            if end - offset > MAX_NAME or self._remaining < 0:
                raise BadBinary(
                    f"the name of a {owner} has {end - offset} bytes (at most {MAX_NAME} are "
                    "allowed) or overlaps too many others; the string table is damaged"
                )
            name = self._table[offset:end].decode("utf-8", "replace")
            self._cache[offset] = name
        return name
