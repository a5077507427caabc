"""Build small cubins for tests from a list of sections."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nostall.sass.binary.elf import SHT_CUDA_INFO, SHT_REL, SHT_RELA, SHT_SYMTAB

PROGBITS, STRTAB = 1, 3
NOP = (0x7918).to_bytes(16, "little")
"""An instruction word whose opcode is NOP."""

_ENTRY_SIZE = {SHT_SYMTAB: 24, SHT_RELA: 24, SHT_REL: 16}


@dataclass(frozen=True)
class SectionSpec:
    """The contents of one section; ``link`` and ``info`` are ``sh_link`` and ``sh_info``."""

    name: str
    type: int
    data: bytes = b""
    link: int = 0
    info: int = 0


def elf(
    *sections: SectionSpec,
    machine: int = 190,
    abi: tuple[int, int] = (65, 8),
    flags: int = 0x06005A04,
) -> bytes:
    """An ELF64 file with these sections; a section with their names is added at the end.

    ``abi`` is the OS/ABI and its version, bytes 7 and 8 of the file.
    """
    names = bytearray(b"\0")
    all_sections = [SectionSpec("", 0), *sections, SectionSpec(".shstrtab", STRTAB)]
    headers, body = [], bytearray()
    name_offsets = []
    for section in all_sections:
        name_offsets.append(len(names))
        names += section.name.encode() + b"\0"
    for section, name_offset in zip(all_sections, name_offsets, strict=True):
        data = bytes(names) if section.name == ".shstrtab" else section.data
        body += b"\0" * (-len(body) % 16)
        file_offset = 64 + len(body)
        body += data
        headers.append(
            (
                name_offset,
                section.type,
                0,
                0,
                file_offset,
                len(data),
                section.link,
                section.info,
                1,
                _ENTRY_SIZE.get(section.type, 0),
            )
        )
    body += b"\0" * (-len(body) % 16)
    ident = b"\x7fELF" + bytes((2, 1, 1, *abi)) + b"\0" * 7
    count = len(all_sections)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(ident, 2, machine, 1, 0, 0, 64 + len(body), flags, 64, 56, 0, 64, count, count - 1),
    )
    return head + bytes(body) + b"".join(struct.pack("<IIQQQQIIQQ", *h) for h in headers)


def text(words: int = 4, name: str = "k") -> SectionSpec:
    """A ``.text`` section of NOPs; ``words`` is their number."""
    return SectionSpec(f".text.{name}", PROGBITS, NOP * words)


def attribute(code: int, *values: int, format: int = 4) -> bytes:
    """The bytes of a ``.nv.info`` attribute whose payload is u32 values."""
    payload = b"".join(struct.pack("<I", value) for value in values)
    return struct.pack("<BBH", format, code, len(payload)) + payload


def info(*entries: bytes, name: str = "k") -> SectionSpec:
    """A ``.nv.info`` section with these attributes for function ``name``."""
    return SectionSpec(f".nv.info.{name}", SHT_CUDA_INFO, b"".join(entries))


def symbols(*entries: tuple[int, int, int, int, int], link: int) -> SectionSpec:
    """A symbol table; each symbol is (name offset, type, other, section, value)."""
    rows = [struct.pack("<IBBHQQ", n, kind, other, s, v, 0) for n, kind, other, s, v in entries]
    return SectionSpec(".symtab", SHT_SYMTAB, b"".join(rows), link)


def relocations(*entries: tuple[int, int], target: int, addend: bool = True) -> SectionSpec:
    """A relocation section; each relocation is (offset, type).  ``addend``: RELA, else REL."""
    rows = [struct.pack("<QQ", *e) + (b"\0" * 8 if addend else b"") for e in entries]
    kind, name = (SHT_RELA, ".rela") if addend else (SHT_REL, ".rel")
    return SectionSpec(f"{name}.text.k", kind, b"".join(rows), info=target)
