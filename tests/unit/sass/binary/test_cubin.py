"""Cubin container: ELF variants, architectures, functions and damaged files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.corpus import catalogue
from tests.unit.sass.binary.cubin_builder import (
    NOP,
    PROGBITS,
    STRTAB,
    SectionSpec,
    attribute,
    elf,
    info,
    relocations,
    symbols,
    text,
)

from nostall.core.errors import BadBinary, UnsupportedArchitecture
from nostall.sass.binary.cubin import ARCHITECTURES, Cubin, upgrade_elf_header
from nostall.sass.binary.listing import disassemble

NAMES = SectionSpec(".strtab", STRTAB, b"\0k\0helper\0other\0")


def find_old_variant() -> Path:
    """Path of a corpus cubin of the older ELF variant."""
    for path in catalogue.triton_corpus():
        if path.read_bytes()[7] == 51:
            return path
    raise AssertionError("the corpus has no cubin of the older variant")


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_both_elf_variants_give_the_architecture(sm: int) -> None:
    assert Cubin.parse(elf(text(), flags=0x06000004 | sm << 8)).sm == sm
    assert Cubin.parse(elf(text(), abi=(51, 7), flags=0x00000500 | sm << 16 | sm)).sm == sm


@pytest.mark.parametrize("sm", [0, 70, 74, 87, 103, 121, 255])
def test_other_architectures_are_rejected(sm: int) -> None:
    for data in (
        elf(text(), flags=0x06000004 | sm << 8),
        elf(text(), abi=(51, 7), flags=0x500 | sm),
    ):
        with pytest.raises(UnsupportedArchitecture, match=f"sm_{sm}; supported are sm_75"):
            Cubin.parse(data)


@pytest.mark.parametrize("path", catalogue.unsupported_cubins(), ids=lambda p: p.stem)
def test_compiled_cubins_of_other_architectures_are_rejected(path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=path.stem.rpartition(".")[2]):
        Cubin.parse(path.read_bytes())


def test_another_abi_is_rejected() -> None:
    with pytest.raises(BadBinary, match="OS/ABI 0 is not a known cubin variant"):
        Cubin.parse(elf(text(), abi=(0, 0)))


def test_functions_have_their_symbols_and_records() -> None:
    data = elf(
        text(4, "k"),
        text(2, "helper"),
        NAMES,
        symbols(
            *((1, 2, 0x10, 1, 0), (3, 2, 0, 2, 0), (10, 2, 0, 1, 0x20), (10, 1, 0, 1, 0x30)),
            link=3,
        ),
        info(attribute(0x1C, 0x10)),
        info(attribute(0x28, 0x10), attribute(0x7F, 0x10), name="helper"),
        relocations((0x28, 1), (0x38, 2), (0x40, 3), target=1),
    )
    cubin = Cubin.parse(data)
    kernel, helper = cubin.texts
    assert (kernel.name, kernel.size, kernel.is_kernel) == ("k", 64, True)
    assert data[kernel.file_offset : kernel.file_offset + 64] == NOP * 4
    assert kernel.entries == ((0, "k"), (0x20, "other"))
    assert [(r.offset, r.width, r.source) for r in kernel.records] == [
        (0x28, 8, "relocation 1"),
        (0x38, 8, "relocation 2"),
        (0x10, 4, "EXIT_INSTR_OFFSETS"),
    ]
    assert (helper.is_kernel, helper.pinned) == (False, {0x10})
    assert [r.source for r in helper.records] == ["COOP_GROUP_INSTR_OFFSETS"]
    for record in kernel.records:
        value = data[record.file_offset : record.file_offset + record.width]
        assert int.from_bytes(value, "little") == record.offset


def test_the_symbol_of_a_function_tells_whether_it_is_a_kernel() -> None:
    def kernels(*rows: tuple[int, int, int, int, int]) -> list[bool]:
        data = elf(text(), text(1, "helper"), NAMES, symbols(*rows, link=3))
        return [t.is_kernel for t in Cubin.parse(data).texts]

    assert kernels((1, 2, 0x10, 1, 0), (3, 2, 0x00, 2, 0)) == [True, False]
    assert kernels((1, 1, 0x10, 1, 0)) == [False, False]  # not a function
    assert kernels((3, 2, 0x10, 1, 0)) == [False, False]  # of another name
    assert kernels((1, 2, 0x10, 2, 0)) == [False, False]  # in another section


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (elf(SectionSpec(".nv.info", 0x70000000)), "no machine code"),
        (elf(text(0)), "no machine code"),
        (elf(SectionSpec(".text.k", 8, b"")), "no machine code"),
        (elf(SectionSpec(".text.k", PROGBITS, NOP + b"\0")), "has 17 bytes"),
        (elf(text(), text()), "section '.text.k' appears twice"),
        (elf(text(), info(b"\x04\x1c\xff\xff")), "damaged attribute"),
    ],
)
def test_damaged_cubins_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(BadBinary) as caught:
        Cubin.parse(data)
    assert message in str(caught.value)


def test_an_older_cubin_is_disassembled_with_the_newer_header() -> None:
    path = find_old_variant()
    data = path.read_bytes()
    cubin = Cubin.parse(data)
    copy = upgrade_elf_header(data, cubin.sm)
    assert len(copy) == len(data)
    changed = {at for at, (a, b) in enumerate(zip(data, copy, strict=True)) if a != b}
    assert changed and changed <= {7, 8, *range(0x14, 0x18), *range(0x30, 0x34)}
    assert (copy[7], copy[8]) == (65, 8)
    assert struct.unpack_from("<I", copy, 0x14) == (1,)
    assert Cubin.parse(copy).sm == cubin.sm
    assert [t.size for t in Cubin.parse(copy).texts] == [t.size for t in cubin.texts]
    listings = disassemble(cubin)
    assert {t.name for t in cubin.texts} == set(listings)
    assert any(row.defs for row in listings[cubin.texts[0].name].rows)


def test_a_newer_cubin_keeps_its_header() -> None:
    data = (catalogue.NVCC / "calls.sm_90.cubin").read_bytes()
    assert upgrade_elf_header(data, 90) is data


@pytest.mark.parametrize(("sm", "flags"), [(90, 0x06005A04), (100, 0x06006402), (75, 0x06004B04)])
def test_the_flags_of_the_upgraded_header(sm: int, flags: int) -> None:
    copy = upgrade_elf_header(elf(text(), abi=(51, 7), flags=sm), sm)
    assert struct.unpack_from("<I", copy, 0x30) == (flags,)
