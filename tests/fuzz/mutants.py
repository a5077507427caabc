"""Mutants of cubins for fuzzing: the seed alone determines a mutant."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from nostall.sass.binary.elf import SHT_CUDA_INFO, SHT_REL, SHT_RELA, SHT_SYMTAB, Elf, Section

HEADER_FIELDS = {
    "e_ident": (4, 5),
    "osabi": (7, 1),
    "abiversion": (8, 1),
    "e_type": (16, 2),
    "e_machine": (18, 2),
    "e_version": (20, 4),
    "e_phoff": (32, 8),
    "e_shoff": (40, 8),
    "e_flags": (48, 4),
    "e_ehsize": (52, 2),
    "e_phentsize": (54, 2),
    "e_phnum": (56, 2),
    "e_shentsize": (58, 2),
    "e_shnum": (60, 2),
    "e_shstrndx": (62, 2),
}
"""Field of the ELF header -> (offset, width) in bytes."""

SECTION_FIELDS = {
    "sh_name": (0, 4),
    "sh_type": (4, 4),
    "sh_flags": (8, 8),
    "sh_addr": (16, 8),
    "sh_offset": (24, 8),
    "sh_size": (32, 8),
    "sh_link": (40, 4),
    "sh_info": (44, 4),
    "sh_addralign": (48, 8),
    "sh_entsize": (56, 8),
}
"""Field of a section header -> (offset, width) in bytes."""

_SECTION_HEADER = 64


@dataclass(frozen=True)
class Original:
    """An undamaged cubin and its layout."""

    name: str
    data: bytes
    elf: Elf

    @classmethod
    def read(cls, path: Path) -> Original:
        data = path.read_bytes()
        return cls(path.name, data, Elf.parse(data))

    @property
    def section_table_offset(self) -> int:
        """File position of the section table."""
        return int.from_bytes(self.data[40:48], "little")

    def sections(self, *types: int) -> list[Section]:
        """Sections of these types, without empty ones."""
        return [s for s in self.elf.sections if s.type in types and s.size]

    @property
    def texts(self) -> list[Section]:
        """Sections of machine code, without empty ones."""
        return [s for s in self.elf.sections if s.name.startswith(".text.") and s.size]


@dataclass(frozen=True)
class Mutant:
    """A damaged cubin."""

    seed: int
    original: str
    """File name of the undamaged cubin."""
    mutation: str
    """Name of the mutation; a second one follows after ``+``."""
    data: bytes


Mutation = Callable[[Original, random.Random], bytes]


def mutate(originals: Sequence[Original], mutations: Sequence[Mutation], seed: int) -> Mutant:
    """The mutant of a seed; in a fifth of all mutants two mutations are combined."""
    rng = random.Random(seed)
    original = rng.choice(originals)
    mutation = rng.choice(mutations)
    data = mutation(original, rng)
    name = mutation.__name__
    if rng.random() < 0.2:
        second = rng.choice((bit_flips, byte_runs, truncation))
        data = second(Original(original.name, data, original.elf), rng)
        name += f"+{second.__name__}"
    return Mutant(seed, original.name, name, data)


def _absurd_number(original: Original, rng: random.Random, width: int) -> bytes:
    """The bytes of a number that may break a parser: near a limit of the file, or random."""
    size = len(original.data)
    section = rng.choice(original.elf.sections)
    choices = (0, 1, 2, 15, 16, 17, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 63)
    near = (size, size - 1, size + 1, size - 16, section.offset, section.offset + section.size)
    value = rng.choice((*choices, *near, (1 << 64) - 1, rng.getrandbits(64), rng.randrange(size)))
    return (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")


def _overwrite(data: bytes, at: int, piece: bytes) -> bytes:
    """Replace the bytes at position ``at`` by ``piece``."""
    return data[:at] + piece + data[at + len(piece) :]


def bit_flips(original: Original, rng: random.Random) -> bytes:
    """Flip 1 to 64 bits anywhere."""
    data = bytearray(original.data)
    for _ in range(rng.choice((1, 2, 8, 64))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def byte_runs(original: Original, rng: random.Random) -> bytes:
    """Write a run of equal or random bytes anywhere."""
    if not original.data:
        return b""
    length = rng.choice((1, 4, 16, 64, 512))
    run = rng.choice((b"\0" * length, b"\xff" * length, rng.randbytes(length)))
    at = rng.randrange(len(original.data))
    return _overwrite(original.data, at, run)[: len(original.data)]


def truncation(original: Original, rng: random.Random) -> bytes:
    """Keep only the beginning of the file."""
    return original.data[: rng.choice((rng.randrange(65), rng.randrange(len(original.data) + 1)))]


def removal(original: Original, rng: random.Random) -> bytes:
    """Cut a piece out, so that everything after it moves."""
    at = rng.randrange(len(original.data))
    return original.data[:at] + original.data[at + rng.choice((1, 8, 16, 100, 1000)) :]


def repetition(original: Original, rng: random.Random) -> bytes:
    """Copy a piece of the file over another one."""
    size = len(original.data)
    start, length = rng.randrange(size), rng.choice((4, 16, 64, 1024))
    return _overwrite(original.data, rng.randrange(size), original.data[start : start + length])[
        :size
    ]


def header_field(original: Original, rng: random.Random) -> bytes:
    """Write an absurd number into the ELF header."""
    at, width = rng.choice(list(HEADER_FIELDS.values()))
    return _overwrite(original.data, at, _absurd_number(original, rng, width))


def section_field(original: Original, rng: random.Random) -> bytes:
    """Write absurd numbers into section headers."""
    data = original.data
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, width = rng.choice(list(SECTION_FIELDS.values()))
        index = rng.randrange(len(original.elf.sections))
        position = original.section_table_offset + index * _SECTION_HEADER + at
        data = _overwrite(data, position, _absurd_number(original, rng, width))
    return data


def section_types(original: Original, rng: random.Random) -> bytes:
    """Give half of the sections the type of a symbol table, relocations or attributes."""
    data = original.data
    for index in range(len(original.elf.sections)):
        if rng.random() < 0.5:
            kind = rng.choice((SHT_SYMTAB, SHT_RELA, SHT_REL, SHT_CUDA_INFO, 8, 3))
            position = original.section_table_offset + index * _SECTION_HEADER + 4
            data = _overwrite(data, position, struct.pack("<I", kind))
    return data


def section_shuffle(original: Original, rng: random.Random) -> bytes:
    """Reorder the section table, or copy one header over all others."""
    count, at = len(original.elf.sections), original.section_table_offset
    headers = [
        original.data[at + i * _SECTION_HEADER : at + (i + 1) * _SECTION_HEADER]
        for i in range(count)
    ]
    if rng.random() < 0.3:
        headers = [rng.choice(headers)] * count
    elif rng.random() < 0.5:
        i, j = rng.randrange(count), rng.randrange(count)
        headers[i], headers[j] = headers[j], headers[i]
    else:
        rng.shuffle(headers)
    return _overwrite(original.data, at, b"".join(headers))


def many_sections(original: Original, rng: random.Random) -> bytes:
    """Append a section table with up to 65000 headers of the same bytes."""
    at = original.section_table_offset + rng.randrange(len(original.elf.sections)) * _SECTION_HEADER
    header = original.data[at : at + _SECTION_HEADER]
    count = rng.choice((100, 100, 500, 500, 2000, 2000, 2000, 65000))
    data = _overwrite(original.data, 40, struct.pack("<Q", len(original.data)))
    return _overwrite(data, 60, struct.pack("<H", count)) + header * count


def attribute(original: Original, rng: random.Random) -> bytes:
    """Damage ``.nv.info`` sections."""
    return _damage_sections(original, rng, original.sections(SHT_CUDA_INFO), 4)


def symbol(original: Original, rng: random.Random) -> bytes:
    """Damage the symbol table."""
    return _damage_sections(original, rng, original.sections(SHT_SYMTAB), 8)


def relocation(original: Original, rng: random.Random) -> bytes:
    """Damage relocations, and in half of the cases give them another target section."""
    tables = original.sections(SHT_REL, SHT_RELA)
    data = _damage_sections(original, rng, tables, 8)
    if tables and rng.random() < 0.5:
        table = rng.choice(tables)
        position = original.section_table_offset + table.index * _SECTION_HEADER + 44
        data = _overwrite(data, position, struct.pack("<I", rng.choice(original.texts).index))
    return data


def string_table(original: Original, rng: random.Random) -> bytes:
    """Fill a string table with one byte: names without an end, or one very long name."""
    tables = [s for s in original.elf.sections if s.type == 3 and s.size]
    table = rng.choice(tables)
    filler = rng.choice((b"a", b"\0", b"\xff")) * (table.size - rng.choice((0, 1)))
    return _overwrite(original.data, table.offset, filler)


def text_bits(original: Original, rng: random.Random) -> bytes:
    """Flip 1 to 8 bits of machine code."""
    data = bytearray(original.data)
    section = rng.choice(original.texts)
    for _ in range(rng.choice((1, 1, 2, 8))):
        data[section.offset + rng.randrange(section.size)] ^= 1 << rng.randrange(8)
    return bytes(data)


def text_words(original: Original, rng: random.Random) -> bytes:
    """Replace instruction words by others, by noise or by zeros."""
    data = bytearray(original.data)
    section = rng.choice(original.texts)
    for _ in range(rng.choice((1, 2, 10))):
        at, other = (section.offset + 16 * rng.randrange(section.size // 16) for _ in range(2))
        word = rng.choice((bytes(data[other : other + 16]), rng.randbytes(16), b"\0" * 16))
        data[at : at + 16] = word
    return bytes(data)


def control_words(original: Original, rng: random.Random) -> bytes:
    """Flip bits of control words (bits 105 to 124 of instruction words)."""
    data = bytearray(original.data)
    section = rng.choice(original.texts)
    for _ in range(rng.choice((1, 2, 20))):
        at = section.offset + 16 * rng.randrange(section.size // 16)
        word = int.from_bytes(data[at : at + 16], "little") ^ 1 << rng.randrange(105, 125)
        data[at : at + 16] = word.to_bytes(16, "little")
    return bytes(data)


def exchange(original: Original, rng: random.Random) -> bytes:
    """Exchange neighbouring instruction words."""
    data = bytearray(original.data)
    section = rng.choice(original.texts)
    for _ in range(rng.choice((1, 5))):
        at = section.offset + 16 * rng.randrange(section.size // 16 - 1)
        data[at : at + 32] = data[at + 16 : at + 32] + data[at : at + 16]
    return bytes(data)


def _damage_sections(
    original: Original, rng: random.Random, sections: Sequence[Section], word: int
) -> bytes:
    """Write absurd numbers of up to ``word`` bytes into one to four of these sections."""
    if not sections:
        return bit_flips(original, rng)
    data = original.data
    for _ in range(rng.choice((1, 1, 4))):
        section = rng.choice(sections)
        width = rng.choice((1, 2, word))
        at = section.offset + rng.randrange(max(1, section.size - width))
        data = _overwrite(data, at - at % width, _absurd_number(original, rng, width))
    return data


CONTAINER_MUTATIONS: tuple[Mutation, ...] = (
    bit_flips,
    byte_runs,
    truncation,
    removal,
    repetition,
    header_field,
    section_field,
    section_types,
    section_shuffle,
    many_sections,
    attribute,
    symbol,
    relocation,
    string_table,
)
"""Mutations for nostall's own parsers of the container."""

CONTENT_MUTATIONS: tuple[Mutation, ...] = (
    bit_flips,
    byte_runs,
    repetition,
    section_field,
    attribute,
    symbol,
    relocation,
    text_bits,
    text_words,
    control_words,
    exchange,
)
"""Mutations that often pass the parsers, so that nvdisasm and the verifier get the damage."""
