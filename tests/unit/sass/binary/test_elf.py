"""The ELF reader: agrees with pyelftools on compilers' files, and bounded on all others."""

from __future__ import annotations

import io
import struct
import time
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.relocation import RelocationSection
from elftools.elf.sections import SymbolTableSection
from tests.corpus import catalogue
from tests.unit.sass.binary.cubin_builder import STRTAB, Part, elf, relocations, symbols, text

from nostall.core.errors import BadBinary
from nostall.sass.binary.elf import MAX_BYTES, SHT_SYMTAB, Elf


def ours(data: bytes) -> Elf:
    return Elf.parse(data)


def oracle_slice() -> list[Path]:
    """Every committed cubin and some of both Triton versions."""
    triton = catalogue.triton_corpus()
    return [*catalogue.nvcc_corpus(), *triton[:: max(1, len(triton) // 40)]]


def test_sections_symbols_and_relocations_agree_with_pyelftools() -> None:
    variants = set()
    relocation_count = 0
    for path in oracle_slice():
        data = path.read_bytes()
        mine, theirs = Elf.parse(data), ELFFile(io.BytesIO(data))
        assert mine.flags == theirs["e_flags"]
        assert mine.os_abi == data[7] and mine.abi_version == data[8]
        variants.add((mine.os_abi, mine.abi_version))
        expected_symbols, expected_relocations = [], []
        assert len(mine.sections) == theirs.num_sections()
        for section, other in zip(mine.sections, theirs.iter_sections(), strict=True):
            head = other.header
            raw = struct.unpack_from("<I", data, theirs["e_shoff"] + 64 * section.index + 4)[0]
            assert section.name == other.name
            assert section.type == raw
            assert (section.flags, section.offset, section.size, section.link, section.info) == (
                head["sh_flags"],
                head["sh_offset"],
                head["sh_size"],
                head["sh_link"],
                head["sh_info"],
            )
            if raw != 8:
                assert mine.content(section) == other.data()
            if isinstance(other, SymbolTableSection):
                at = head["sh_offset"]
                for i, symbol in enumerate(other.iter_symbols()):
                    kind, where = struct.unpack_from("<BxH", data, at + 24 * i + 4)
                    expected_symbols.append(
                        (symbol.name, kind & 15, where, symbol["st_value"], symbol["st_size"])
                    )
            if isinstance(other, RelocationSection):
                for i, entry in enumerate(other.iter_relocations()):
                    place = head["sh_offset"] + i * head["sh_entsize"]
                    expected_relocations.append(
                        (place, head["sh_info"], entry["r_offset"], entry["r_info_type"])
                    )
        assert [
            (s.name, s.type, s.section, s.value, s.size) for s in mine.symbols()
        ] == expected_symbols
        assert [
            (r.at, r.target, r.offset, r.type) for r in mine.relocations()
        ] == expected_relocations
        relocation_count += len(expected_relocations)
    assert variants == {(51, 7), (65, 8)}
    assert relocation_count > 100


def test_both_kinds_of_relocations() -> None:
    data = elf(
        text(),
        relocations((16, 7), (40, 9), target=1),
        relocations((32, 8), target=1, addend=False),
    )
    found = ours(data).relocations()
    assert [(r.target, r.offset, r.type) for r in found] == [(1, 16, 7), (1, 40, 9), (1, 32, 8)]
    assert [struct.unpack_from("<QQ", data, r.at) for r in found] == [(16, 7), (40, 9), (32, 8)]


GOOD = elf(text(), Part(".strtab", STRTAB, b"\0k\0"), symbols((1, 2, 0x10, 1, 0), link=2))


def patched(at: int, form: str, value: int, data: bytes = GOOD) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, value)
    return bytes(out)


HEADERS = struct.unpack_from("<Q", GOOD, 40)[0]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not an ELF file"),
        (b"#!/bin/sh\n", "not an ELF file"),
        (GOOD[:40], "truncated: 40 bytes"),
        (GOOD[:-1], "truncated: 5 section headers"),
        (patched(4, "B", 1), "ELF class 1"),
        (patched(5, "B", 2), "byte order 2"),
        (patched(18, "<H", 224), "machine 224"),
        (patched(58, "<H", 40), "section headers of 40 bytes"),
        (patched(60, "<H", 0), "0 section headers"),
        (patched(60, "<H", 0xFFFF), "65535 section headers"),
        (patched(40, "<Q", 1 << 63), "do not fit"),
        (patched(62, "<H", 5), "index 5 of 5 sections"),
        (patched(62, "<H", 0xFFFF), "section-name table has index"),
        (patched(HEADERS + 64 * 4 + 24, "<Q", len(GOOD)), "does not lie inside the file"),
        (patched(HEADERS + 64 * 4 + 4, "<I", 8), "does not lie inside the file"),
        (patched(HEADERS + 64 * 1 + 0, "<I", 1 << 31), "outside its string table"),
        (patched(HEADERS + 64 * 1 + 32, "<Q", 1 << 62), "claims bytes"),
        (patched(HEADERS + 64 * 1 + 24, "<Q", (1 << 64) - 1), "claims bytes"),
        (patched(HEADERS + 64 * 1 + 24, "<Q", 32), "inside the ELF header"),
        (patched(HEADERS + 64 * 1 + 24, "<Q", HEADERS + 8), "inside the section table"),
        (patched(HEADERS + 64 * 3 + 24, "<Q", 64 + 16), "inside section '.text.k'"),
    ],
)
def test_damage_is_named(data: bytes, said: str) -> None:
    with pytest.raises(BadBinary) as caught:
        ours(data)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (patched(HEADERS + 64 * 3 + 40, "<I", 99), "names section 99 as its string table"),
        (patched(HEADERS + 64 * 3 + 40, "<I", 1), "outside its string table"),
    ],
)
def test_damaged_symbol_tables(data: bytes, said: str) -> None:
    table = patched(GOOD.index(b"\x01\0\0\0\x02\x10"), "<I", 1000, data)
    with pytest.raises(BadBinary) as caught:
        ours(table).symbols()
    assert said in str(caught.value)


def test_a_file_that_is_too_large_is_not_read() -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return MAX_BYTES + 1

    with pytest.raises(BadBinary, match="at most"):
        ours(Large(GOOD))


def test_overlapping_names_cost_linear_time_and_memory() -> None:
    """Symbol i begins at byte i of one name: together n*n/2 characters."""
    count = 40_000
    table = symbols(*((i, 2, 0, 1, 0) for i in range(count)), link=2)
    data = elf(text(), Part(".strtab", STRTAB, b"a" * count + b"\0"), table)
    start = time.process_time()
    with pytest.raises(BadBinary, match="overlaps too many others"):
        ours(data).symbols()
    assert time.process_time() - start < 5


def test_one_name_under_every_symbol_is_stored_once() -> None:
    table = symbols(*((0, 2, 0, 1, 0) for _ in range(5_000)), link=2)
    found = ours(elf(text(), Part(".strtab", STRTAB, b"a" * 50_000 + b"\0"), table)).symbols()
    assert len(found) == 5_000
    assert len({id(s.name) for s in found}) == 1


def test_an_endless_name_is_refused() -> None:
    table = symbols((0, 2, 0, 1, 0), link=2)
    data = elf(text(), Part(".strtab", STRTAB, b"a" * 70_000 + b"\0"), table)
    with pytest.raises(BadBinary, match="70000 bytes"):
        ours(data).symbols()


def test_many_tables_over_the_same_bytes_are_refused() -> None:
    """Thousands of symbol tables that share their bytes would cost their product."""
    data = bytearray(GOOD)
    header = data[HEADERS + 64 * 3 : HEADERS + 64 * 4]
    assert struct.unpack_from("<I", header, 4)[0] == SHT_SYMTAB
    copies = 1000
    struct.pack_into("<Q", data, 40, len(data))
    struct.pack_into("<H", data, 60, 5 + copies)
    data += data[HEADERS : HEADERS + 64 * 5] + header * copies
    with pytest.raises(BadBinary, match=r"inside section '\.symtab'"):
        ours(bytes(data))
