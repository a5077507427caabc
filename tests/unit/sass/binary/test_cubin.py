"""Cubins as containers: variants, architectures, functions, and what is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from tests.corpus import catalogue
from tests.unit.sass.binary.cubin_builder import (
    NOP,
    PROGBITS,
    STRTAB,
    Part,
    attribute,
    elf,
    info,
    relocations,
    symbols,
    text,
)

from nostall.core.errors import BadBinary, UnsupportedArchitecture
from nostall.sass.binary.cubin import ARCHITECTURES, Cubin, disassemblable
from nostall.sass.binary.listing import disassemble

NAMES = Part(".strtab", STRTAB, b"\0k\0helper\0other\0")


def old_variant() -> Path:
    """A cubin of the older ELF variant."""
    for path in catalogue.triton_corpus():
        if path.read_bytes()[7] == 51:
            return path
    raise AssertionError("the corpus has no cubin of the older variant")


@pytest.mark.parametrize("sm", ARCHITECTURES)
def test_the_architecture_of_both_variants(sm: int) -> None:
    assert Cubin.parse(elf(text(), flags=0x06000004 | sm << 8)).sm == sm
    assert Cubin.parse(elf(text(), abi=(51, 7), flags=0x00000500 | sm << 16 | sm)).sm == sm


@pytest.mark.parametrize("sm", [0, 70, 74, 87, 103, 121, 255])
def test_other_architectures_are_refused(sm: int) -> None:
    for data in (
        elf(text(), flags=0x06000004 | sm << 8),
        elf(text(), abi=(51, 7), flags=0x500 | sm),
    ):
        with pytest.raises(UnsupportedArchitecture, match=f"sm_{sm}; supported are sm_75"):
            Cubin.parse(data)


@pytest.mark.parametrize("path", catalogue.refused(), ids=lambda p: p.stem)
def test_refused_cubins_of_a_compiler(path: Path) -> None:
    with pytest.raises(UnsupportedArchitecture, match=path.stem.rpartition(".")[2]):
        Cubin.parse(path.read_bytes())


def test_another_abi_is_refused() -> None:
    with pytest.raises(BadBinary, match="OS/ABI 0 is not a known cubin variant"):
        Cubin.parse(elf(text(), abi=(0, 0)))


def test_functions_symbols_and_records() -> None:
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
    assert data[kernel.at : kernel.at + 64] == NOP * 4
    assert kernel.entries == ((0, "k"), (0x20, "other"))
    assert [(r.offset, r.width, r.source) for r in kernel.records] == [
        (0x28, 8, "relocation 1"),
        (0x38, 8, "relocation 2"),
        (0x10, 4, "EXIT_INSTR_OFFSETS"),
    ]
    assert (helper.is_kernel, helper.pinned) == (False, {0x10})
    assert [r.source for r in helper.records] == ["COOP_GROUP_INSTR_OFFSETS"]
    for record in kernel.records:
        value = data[record.at : record.at + record.width]
        assert int.from_bytes(value, "little") == record.offset


def test_a_kernel_is_what_its_symbol_says() -> None:
    def kernels(*rows: tuple[int, int, int, int, int]) -> list[bool]:
        data = elf(text(), text(1, "helper"), NAMES, symbols(*rows, link=3))
        return [t.is_kernel for t in Cubin.parse(data).texts]

    assert kernels((1, 2, 0x10, 1, 0), (3, 2, 0x00, 2, 0)) == [True, False]
    assert kernels((1, 1, 0x10, 1, 0)) == [False, False]  # not a function
    assert kernels((3, 2, 0x10, 1, 0)) == [False, False]  # of another name
    assert kernels((1, 2, 0x10, 2, 0)) == [False, False]  # in another section


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (elf(Part(".nv.info", 0x70000000)), "no machine code"),
        (elf(text(0)), "no machine code"),
        (elf(Part(".text.k", 8, b"")), "no machine code"),
        (elf(Part(".text.k", PROGBITS, NOP + b"\0")), "has 17 bytes"),
        (elf(text(), text()), "section '.text.k' is there twice"),
        (elf(text(), info(b"\x04\x1c\xff\xff")), "damaged attribute"),
    ],
)
def test_damage(data: bytes, said: str) -> None:
    with pytest.raises(BadBinary) as caught:
        Cubin.parse(data)
    assert said in str(caught.value)


def test_an_older_cubin_is_disassembled_in_a_scratch_copy() -> None:
    path = old_variant()
    data = path.read_bytes()
    cubin = Cubin.parse(data)
    copy = disassemblable(data, cubin.sm)
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


def test_a_newer_cubin_is_disassembled_as_it_is() -> None:
    data = (catalogue.NVCC / "calls.sm_90.cubin").read_bytes()
    assert disassemblable(data, 90) is data


@pytest.mark.parametrize(("sm", "flags"), [(90, 0x06005A04), (100, 0x06006402), (75, 0x06004B04)])
def test_the_rewritten_flags(sm: int, flags: int) -> None:
    copy = disassemblable(elf(text(), abi=(51, 7), flags=sm), sm)
    assert struct.unpack_from("<I", copy, 0x30) == (flags,)
