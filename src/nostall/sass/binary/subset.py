"""Cut a cubin down to some of its functions.

nvdisasm analyses its whole input: a cubin of 10 MB takes 3.4 GB and 95 s.  The part for a function
has its machine code, constants, attributes and relocations.  Symbols keep their numbers, because
attributes and relocations name them.  Symbols that the part does not need are empty, because the
time that nvdisasm takes grows faster than the number of names.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from nostall.sass.binary.elf import (
    ELF_HEADER,
    ELF_SECTION,
    ELF_SYMBOL,
    RELOCATION,
    SHT_CUDA_INFO,
    SHT_NULL,
    SHT_STRTAB,
    SHT_SYMTAB,
    WITHOUT_BYTES,
    Elf,
    Section,
)

_ALIGNMENT = 128
_SECTION_INDICES = range(1, 0xFF00)
"""Values of ``st_shndx`` that name a section; larger ones have other meanings."""


def cut(elf: Elf, names: Collection[str]) -> bytes:
    """A cubin with the functions ``names`` only; all functions of a shared name come together."""
    return _Part(elf, frozenset(names)).to_bytes()


@dataclass(slots=True)
class _Strings:
    """A string table that is being written."""

    data: bytearray = field(default_factory=lambda: bytearray(b"\0"))

    def add(self, text: bytes) -> int:
        """The offset of a name."""
        if not text:
            return 0
        self.data += text + b"\0"
        return len(self.data) - len(text) - 1


class _Part:
    """The sections of the part, and the new contents of its tables."""

    def __init__(self, elf: Elf, names: frozenset[str]) -> None:
        self._elf = elf
        self._names = names
        self._kept = [s for s in elf.sections if self._belongs(s)]
        self._number = {section.index: at for at, section in enumerate(self._kept)}
        self._names_index: int = ELF_HEADER.unpack_from(elf.data)[13]
        self._section_names = _Strings()
        self._name_offsets = [self._section_names.add(s.name.encode()) for s in self._kept]
        self._contents = {self._names_index: bytes(self._section_names.data)}
        for table in self._kept:
            if table.type == SHT_SYMTAB and table.link != self._names_index:
                self._prune_symbols(table)

    def to_bytes(self) -> bytes:
        """The file."""
        data, headers = bytearray(ELF_HEADER.size), bytearray()
        for at, section in enumerate(self._kept):
            content = self._contents.get(section.index, self._elf.content(section))
            data += bytes(-len(data) % _ALIGNMENT)
            header = list(self._elf.raw_header(section.index))
            header[0], header[4] = self._name_offsets[at], len(data)
            if section.type not in WITHOUT_BYTES:
                header[5] = len(content)
            header[6] = self._number.get(section.link, 0)
            if self._names_section_in_info(section):
                header[7] = self._number.get(section.info, 0)
            headers += ELF_SECTION.pack(*header)
            data += content
        fields = list(ELF_HEADER.unpack_from(self._elf.data))
        fields[5], fields[6], fields[10] = 0, len(data), 0  # no program headers
        fields[12], fields[13] = len(self._kept), self._number[self._names_index]
        data[: ELF_HEADER.size] = ELF_HEADER.pack(*fields)
        return bytes(data + headers)

    def _belongs(self, section: Section) -> bool:
        """Whether the part needs a section: a table, or a section of one of the functions."""
        if section.type in (SHT_NULL, SHT_STRTAB, SHT_SYMTAB):
            return True
        target = section
        if section.type in RELOCATION and section.info < len(self._elf.sections):
            target = self._elf.sections[section.info]
        for prefix in (".text.", ".nv.info.", ".nv.constant"):
            if target.name.startswith(prefix):
                name = target.name.removeprefix(prefix)
                function = name.partition(".")[2] if prefix == ".nv.constant" else name
                return function in self._names
        return False

    @staticmethod
    def _names_section_in_info(section: Section) -> bool:
        is_constant = section.name.startswith(".nv.constant")
        return section.type in RELOCATION or section.type == SHT_CUDA_INFO or is_constant

    def _prune_symbols(self, table: Section) -> None:
        """Rewrite a symbol table: new section numbers, and only the names that are needed."""
        needed = self._relocated_symbols()
        strings = self._elf.content(self._elf.sections[table.link])
        content, names = bytearray(self._elf.content(table)), _Strings()
        for at in range(0, len(content) - ELF_SYMBOL.size + 1, ELF_SYMBOL.size):
            name, info, other, index, value, size = ELF_SYMBOL.unpack_from(content, at)
            new_index = self._number.get(index, 0) if index in _SECTION_INDICES else index
            if not new_index and at // ELF_SYMBOL.size not in needed:
                content[at : at + ELF_SYMBOL.size] = bytes(ELF_SYMBOL.size)
                continue
            text = strings[name : strings.find(b"\0", name)]
            place = names.add(text)
            ELF_SYMBOL.pack_into(content, at, place, info, other, new_index, value, size)
        self._contents[table.index] = bytes(content)
        self._contents[table.link] = bytes(names.data)

    def _relocated_symbols(self) -> frozenset[int]:
        """The numbers of the symbols that relocations of the part name."""
        numbers: set[int] = set()
        for section in self._kept:
            layout = RELOCATION.get(section.type)
            if layout is not None:
                content = self._elf.content(section)
                whole = len(content) - len(content) % layout.size
                numbers.update(f[1] >> 32 for f in layout.iter_unpack(content[:whole]))
        return frozenset(numbers)
