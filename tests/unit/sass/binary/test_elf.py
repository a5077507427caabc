"""ELF reader: agrees with pyelftools on compiler output, and is bounded on damaged files."""

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
from tests.unit.sass.binary.cubin_builder import (
    STRTAB,
    SectionSpec,
    elf,
    relocations,
    symbols,
    text,
)

from nostall.core.errors import BadBinary
from nostall.sass.binary.elf import MAX_BYTES, SHT_SYMTAB, Elf


def compared_cubins() -> list[Path]:
    """All committed cubins and some of both Triton versions."""
    triton = catalogue.triton_corpus()
    return [*sorted(catalogue.NVCC.glob("*.cubin")), *triton[:: max(1, len(triton) // 40)]]


def test_sections_symbols_and_relocations_agree_with_pyelftools() -> None:
    variants = set()
    relocation_count = 0
    for path in compared_cubins():
        data = path.read_bytes()
        parsed, reference = Elf.parse(data), ELFFile(io.BytesIO(data))
        assert parsed.flags == reference["e_flags"]
        assert parsed.os_abi == data[7] and parsed.abi_version == data[8]
        variants.add((parsed.os_abi, parsed.abi_version))
        expected_symbols, expected_relocations = [], []
        assert len(parsed.sections) == reference.num_sections()
        for section, expected in zip(parsed.sections, reference.iter_sections(), strict=True):
            header = expected.header
            section_type = struct.unpack_from(
                "<I", data, reference["e_shoff"] + 64 * section.index + 4
            )[0]
            assert section.name == expected.name
            assert section.type == section_type
            assert (section.flags, section.offset, section.size, section.link, section.info) == (
                header["sh_flags"],
                header["sh_offset"],
                header["sh_size"],
                header["sh_link"],
                header["sh_info"],
            )
            if section_type != 8:
                assert parsed.content(section) == expected.data()
            if isinstance(expected, SymbolTableSection):
                table_offset = header["sh_offset"]
                for i, symbol in enumerate(expected.iter_symbols()):
                    kind, section_index = struct.unpack_from(
                        "<BxH", data, table_offset + 24 * i + 4
                    )
                    expected_symbols.append(
                        (
                            symbol.name,
                            kind & 15,
                            section_index,
                            symbol["st_value"],
                            symbol["st_size"],
                        )
                    )
            if isinstance(expected, RelocationSection):
                for i, entry in enumerate(expected.iter_relocations()):
                    file_offset = header["sh_offset"] + i * header["sh_entsize"]
                    expected_relocations.append(
                        (file_offset, header["sh_info"], entry["r_offset"], entry["r_info_type"])
                    )
        assert [
            (s.name, s.type, s.section, s.value, s.size) for s in parsed.symbols()
        ] == expected_symbols
        assert [
            (r.file_offset, r.target, r.offset, r.type) for r in parsed.relocations()
        ] == expected_relocations
        relocation_count += len(expected_relocations)
    assert variants == {(51, 7), (65, 8)}
    assert relocation_count > 100


def test_rel_and_rela_relocations() -> None:
    data = elf(
        text(),
        relocations((16, 7), (40, 9), target=1),
        relocations((32, 8), target=1, addend=False),
    )
    parsed = Elf.parse(data).relocations()
    assert [(r.target, r.offset, r.type) for r in parsed] == [(1, 16, 7), (1, 40, 9), (1, 32, 8)]
    assert [struct.unpack_from("<QQ", data, r.file_offset) for r in parsed] == [
        (16, 7),
        (40, 9),
        (32, 8),
    ]


GOOD = elf(text(), SectionSpec(".strtab", STRTAB, b"\0k\0"), symbols((1, 2, 0x10, 1, 0), link=2))


def patched(at: int, form: str, value: int, data: bytes = GOOD) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, value)
    return bytes(out)


HEADERS = struct.unpack_from("<Q", GOOD, 40)[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an ELF file"),
        (b"#!/bin/sh\n", "not an ELF file"),
        (GOOD[:40], "truncated: 40 bytes"),
        (GOOD[:-1], "truncated: 5 section headers"),
        (patched(56, "<H", 999), "truncated: 999 program headers at byte 0"),
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
def test_damaged_files_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(BadBinary) as caught:
        Elf.parse(data)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (patched(HEADERS + 64 * 3 + 40, "<I", 99), "names section 99 as its string table"),
        (patched(HEADERS + 64 * 3 + 40, "<I", 1), "outside its string table"),
    ],
)
def test_damaged_symbol_tables_are_rejected(data: bytes, message: str) -> None:
    table = patched(GOOD.index(b"\x01\0\0\0\x02\x10"), "<I", 1000, data)
    with pytest.raises(BadBinary) as caught:
        Elf.parse(table).symbols()
    assert message in str(caught.value)


def test_a_file_that_is_too_large_is_rejected() -> None:
    class Large(bytes):
        def __len__(self) -> int:
            return MAX_BYTES + 1

    with pytest.raises(BadBinary, match="at most"):
        Elf.parse(Large(GOOD))


def test_overlapping_names_cost_linear_time_and_memory() -> None:
    """The name of symbol i begins at byte i of one string: n*n/2 characters in all."""
    count = 40_000
    table = symbols(*((i, 2, 0, 1, 0) for i in range(count)), link=2)
    data = elf(text(), SectionSpec(".strtab", STRTAB, b"a" * count + b"\0"), table)
    start = time.process_time()
    with pytest.raises(BadBinary, match="overlaps too many others"):
        Elf.parse(data).symbols()
    assert time.process_time() - start < 5


def test_one_name_under_every_symbol_is_stored_once() -> None:
    table = symbols(*((0, 2, 0, 1, 0) for _ in range(5_000)), link=2)
    parsed = Elf.parse(
        elf(text(), SectionSpec(".strtab", STRTAB, b"a" * 50_000 + b"\0"), table)
    ).symbols()
    assert len(parsed) == 5_000
    assert len({id(s.name) for s in parsed}) == 1


def test_a_name_that_is_too_long_is_rejected() -> None:
    table = symbols((0, 2, 0, 1, 0), link=2)
    data = elf(text(), SectionSpec(".strtab", STRTAB, b"a" * 70_000 + b"\0"), table)
    with pytest.raises(BadBinary, match="70000 bytes"):
        Elf.parse(data).symbols()


def test_many_tables_over_the_same_bytes_are_rejected() -> None:
    """A thousand symbol tables over the same bytes would cost time for each of them."""
    data = bytearray(GOOD)
    header = data[HEADERS + 64 * 3 : HEADERS + 64 * 4]
    assert struct.unpack_from("<I", header, 4)[0] == SHT_SYMTAB
    copies = 1000
    struct.pack_into("<Q", data, 40, len(data))
    struct.pack_into("<H", data, 60, 5 + copies)
    data += data[HEADERS : HEADERS + 64 * 5] + header * copies
    with pytest.raises(BadBinary, match=r"inside section '\.symtab'"):
        Elf.parse(bytes(data))
