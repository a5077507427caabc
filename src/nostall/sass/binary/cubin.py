"""A cubin as a container: its architecture, its functions, and where their bytes lie."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from nostall.core.errors import BadBinary, UnsupportedArchitecture
from nostall.sass.binary.attributes import OffsetRecord, offset_records
from nostall.sass.binary.elf import (
    SHT_CUDA_INFO,
    SHT_NOBITS,
    STO_CUDA_ENTRY,
    STT_FUNC,
    Elf,
    Relocation,
    Section,
    Symbol,
)
from nostall.sass.binary.encoding import WORD_BYTES

ARCHITECTURES = (75, 80, 86, 89, 90, 100, 120)

_OLD, _NEW = 51, 65
_EV_CURRENT = 1


@dataclass(frozen=True, slots=True)
class TextSection:
    """The machine code of one function (an entry kernel or a device function).

    ``at`` and ``size`` are in bytes of the file; ``records`` are the offsets written down
    elsewhere in the file; ``pinned`` are the offsets that must not move; ``entries`` are the
    offsets at which symbols of this section begin.
    """

    name: str
    at: int
    size: int
    is_kernel: bool
    entries: tuple[tuple[int, str], ...]
    records: tuple[OffsetRecord, ...]
    pinned: frozenset[int]


@dataclass(frozen=True, slots=True)
class Cubin:
    """A parsed cubin; ``sm`` is the architecture number, such as 90."""

    elf: Elf
    sm: int
    texts: tuple[TextSection, ...]

    @property
    def data(self) -> bytes:
        return self.elf.data

    @classmethod
    def parse(cls, data: bytes) -> Cubin:
        """Read a cubin of either ELF variant; raises :class:`BadBinary`."""
        elf = Elf.parse(data)
        sm = _architecture(elf)
        symbols: dict[int, list[Symbol]] = {}
        for symbol in elf.symbols():
            symbols.setdefault(symbol.section, []).append(symbol)
        relocations: dict[int, list[Relocation]] = {}
        for relocation in elf.relocations():
            relocations.setdefault(relocation.target, []).append(relocation)
        infos: dict[str, list[Section]] = {}
        for section in elf.sections:
            if section.type == SHT_CUDA_INFO:
                infos.setdefault(section.name, []).append(section)
        texts: dict[str, TextSection] = {}
        for section in elf.sections:
            if not section.name.startswith(".text.") or section.type == SHT_NOBITS:
                continue
            if section.size % WORD_BYTES:
                raise BadBinary(
                    f"section {section.name!r} has {section.size} bytes; code comes in "
                    f"{WORD_BYTES}-byte words"
                )
            if section.size == 0:
                continue
            records = [
                OffsetRecord(r.at, r.offset, 8, f"relocation {r.type}")
                for r in relocations.get(section.index, ())
                if r.offset < section.size
            ]
            text = _text(elf, section, symbols.get(section.index, []), records, infos)
            if text.name in texts:
                raise BadBinary(f"section {section.name!r} is there twice; the file is damaged")
            texts[text.name] = text
        if not texts:
            raise BadBinary(
                "the cubin has no machine code (.text section); compile for a real architecture, "
                "for example -arch=sm_90"
            )
        return cls(elf, sm, tuple(texts.values()))


def disassemblable(data: bytes, sm: int) -> bytes:
    """A scratch copy that today's nvdisasm analyses: header of the newer ELF variant.

    Register marks stop with "flow analysis is disabled" when tool and ELF generation differ.
    """
    if data[7] != _OLD:
        return data
    copy = bytearray(data)
    copy[7], copy[8] = _NEW, 8
    struct.pack_into("<I", copy, 0x14, _EV_CURRENT)
    struct.pack_into("<I", copy, 0x30, 0x06000000 | (0x04 if sm < 100 else 0x02) | sm << 8)
    return bytes(copy)


def _architecture(elf: Elf) -> int:
    if elf.os_abi == _OLD:
        sm = elf.flags & 0xFF
    elif elf.os_abi == _NEW:
        sm = elf.flags >> 8 & 0xFF
    else:
        raise BadBinary(
            f"ELF OS/ABI {elf.os_abi} is not a known cubin variant ({_OLD} or {_NEW}); this may be "
            "a relocatable or a newer format"
        )
    check_architecture(sm, "the cubin is for")
    return sm


def check_architecture(sm: int, what: str) -> None:
    """Raise :class:`UnsupportedArchitecture` for one that nostall does not know."""
    if sm not in ARCHITECTURES:
        known = ", ".join(f"sm_{n}" for n in ARCHITECTURES)
        raise UnsupportedArchitecture(f"{what} sm_{sm}; supported are {known}")


def _text(
    elf: Elf,
    section: Section,
    symbols: list[Symbol],
    records: list[OffsetRecord],
    infos: dict[str, list[Section]],
) -> TextSection:
    name = section.name.removeprefix(".text.")
    mine = [s for s in symbols if s.type == STT_FUNC]
    pinned: set[int] = set()
    for info in infos.get(f".nv.info.{name}", ()):
        listed, fixed = offset_records(elf, info, section.size)
        records = records + listed
        pinned |= fixed
    return TextSection(
        name=name,
        at=section.offset,
        size=section.size,
        is_kernel=any(s.other & STO_CUDA_ENTRY and s.name == name for s in mine),
        entries=tuple(sorted({(s.value, s.name) for s in mine})),
        records=tuple(records),
        pinned=frozenset(pinned),
    )
