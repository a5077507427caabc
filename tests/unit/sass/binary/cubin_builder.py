"""Small cubins put together by hand: sections in, ELF bytes out."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nostall.sass.binary.elf import SHT_CUDA_INFO, SHT_REL, SHT_RELA, SHT_SYMTAB

PROGBITS, STRTAB = 1, 3
NOP = (0x7918).to_bytes(16, "little")
"""An instruction word whose opcode is NOP."""

_CODE = 6
_ENTRY = {SHT_SYMTAB: 24, SHT_RELA: 24, SHT_REL: 16}


@dataclass(frozen=True)
class Part:
    """One section."""

    name: str
    type: int
    data: bytes = b""
    link: int = 0
    info: int = 0


def elf(
    *parts: Part, machine: int = 190, abi: tuple[int, int] = (65, 8), flags: int = 0x06005A04
) -> bytes:
    """An ELF64 file with these sections; the table of names is added as the last one."""
    names = bytearray(b"\0")
    sections = [Part("", 0), *parts, Part(".shstrtab", STRTAB)]
    headers, body = [], bytearray()
    offsets = []
    for part in sections:
        offsets.append(len(names))
        names += part.name.encode() + b"\0"
    for part, name in zip(sections, offsets, strict=True):
        data = bytes(names) if part.name == ".shstrtab" else part.data
        body += b"\0" * (-len(body) % 16)
        at = 64 + len(body)
        body += data
        headers.append(
            (
                name,
                part.type,
                0,
                0,
                at,
                len(data),
                part.link,
                part.info,
                1,
                _ENTRY.get(part.type, 0),
            )
        )
    body += b"\0" * (-len(body) % 16)
    ident = b"\x7fELF" + bytes((2, 1, 1, *abi)) + b"\0" * 7
    count = len(sections)
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        *(ident, 2, machine, 1, 0, 0, 64 + len(body), flags, 64, 56, 0, 64, count, count - 1),
    )
    return head + bytes(body) + b"".join(struct.pack("<IIQQQQIIQQ", *h) for h in headers)


def text(words: int = 4, name: str = "k") -> Part:
    """Machine code of NOPs."""
    return Part(f".text.{name}", PROGBITS, NOP * words)


def attribute(code: int, *values: int, format: int = 4) -> bytes:
    """One ``.nv.info`` entry whose payload is u32 values."""
    payload = b"".join(struct.pack("<I", value) for value in values)
    return struct.pack("<BBH", format, code, len(payload)) + payload


def info(*entries: bytes, name: str = "k") -> Part:
    """The attributes of one function."""
    return Part(f".nv.info.{name}", SHT_CUDA_INFO, b"".join(entries))


def symbols(*entries: tuple[int, int, int, int, int], link: int) -> Part:
    """Symbols as (name offset, type, other, section, value)."""
    rows = [struct.pack("<IBBHQQ", n, kind, other, s, v, 0) for n, kind, other, s, v in entries]
    return Part(".symtab", SHT_SYMTAB, b"".join(rows), link)


def relocations(*entries: tuple[int, int], target: int, addend: bool = True) -> Part:
    """Relocations as (offset, type)."""
    rows = [struct.pack("<QQ", *e) + (b"\0" * 8 if addend else b"") for e in entries]
    kind, name = (SHT_RELA, ".rela") if addend else (SHT_REL, ".rel")
    return Part(f"{name}.text.k", kind, b"".join(rows), info=target)
