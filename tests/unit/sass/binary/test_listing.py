"""Parser of nvdisasm listings: rows, words, register marks and labels."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.corpus import catalogue

from nostall.core.errors import BadBinary
from nostall.sass.binary import listing, toolchain
from nostall.sass.binary.cubin import Cubin
from nostall.sass.binary.listing import Row, disassemble, parse


def line(left: str, right: str = "") -> str:
    """A line of a listing with register columns on the right."""
    return f"{left:60}// {right}" if right else left


SMALL = "\n".join(
    (
        "\t.headerflags\t@\"EF_CUDA_SM90\"",
        '\t.section\t.text.k,"ax",@progbits',
        '\t.sectioninfo\t@"SHI_REGISTERS=8"',
        line("", "+-----------+------+-----------+--------+"),
        line("", "|   GPR     | PRED |   UGPR    | UPRED  |"),
        line("", "|           |      |           |        |"),
        line("", "|    000000 |      |    00000  |        |"),
        line("", "|  # 012345 | # 01 |  # 01234  |  # 01  |"),
        line("", "+-----------+------+-----------+--------+"),
        line("        .global         k", "|           |      |           |        |"),
        line("k:", "|           |      |           |        |"),
        line(".text.k:", "|           |      |           |        |"),
        line("        /*0000*/    S2R R4, SR_TID.X ;  /* 0x0000000000047919 */", ""),
        line("    /* 0x000e220000002100 */", "|  2 :   ^  |      |           |        |"),
        line(".L_x_1:", "+..........................................+"),
        line("        /*0010*/    @P1 IADD3 R2, R4, UR3, RZ ;  /* 0x0000000304021c10 */", ""),
        line("    /* 0x001fc8000fffe0ff */", "|  3 : ^ v  | 1  v |  1    v   |        |"),
        line("        /*0020*/    UISETP.NE UP1, UR4, URZ ;  /* 0x0000003f0400728c */", ""),
        line("    /* 0x000fe2000bf25270 */", "|  1 :      |      |  1     v  |  1  ^  |"),
        line("        /*0030*/    IADD3 R2, R2, 0x1, RZ ;  /* 0x0000000102027810 */", ""),
        line("    /* 0x000fca0007ffe0ff */", "|  1 : x    |      |           |        |"),
        line(".L_x_2:", "+..........................................+"),
        "",
        '\t.section\t.nv.info,"",@"SHT_CUDA_INFO"',
        "        /*0000*/    NOP ;  /* 0x0000000000007918 */",
        '\t.section\t.text.empty,"ax",@progbits',
    )
)  # fmt: skip


def test_a_small_listing() -> None:
    listings = parse(SMALL)
    assert set(listings) == {"k", "empty"}
    rows = listings["k"].rows
    word = 0x000E220000002100_0000000000047919
    assert rows[0] == Row(0, "S2R R4, SR_TID.X", word, (("R", 4),), ())
    assert [row.text for row in rows] == [
        "S2R R4, SR_TID.X",
        "@P1 IADD3 R2, R4, UR3, RZ",
        "UISETP.NE UP1, UR4, URZ",
        "IADD3 R2, R2, 0x1, RZ",
    ]
    assert [row.defs for row in rows] == [
        (("R", 4),),
        (("R", 2),),
        (("UP", 1),),
        (("R", 2),),
    ]
    assert [row.uses for row in rows] == [
        (),
        (("R", 4), ("P", 1), ("UR", 3)),
        (("UR", 4),),
        (("R", 2),),
    ]
    assert listings["k"].labels == {"k": 0, ".text.k": 0, ".L_x_1": 0x10, ".L_x_2": 0x40}
    assert listings["empty"].rows == ()


def test_a_listing_cut_off_inside_an_instruction_is_rejected() -> None:
    broken = SMALL.replace("    /* 0x000fca0007ffe0ff */", "    something else")
    assert broken != SMALL
    with pytest.raises(BadBinary, match="inside an instruction"):
        parse(broken)


def test_text_without_sections_gives_no_listing() -> None:
    assert parse("") == {}
    assert parse("no listing at all\n\n") == {}


GOLDEN = [
    (0x00, "MOV R1, c[0x0][0x28]", (("R", 1),), ()),
    (0x10, "S2R R4, SR_TID.X", (("R", 4),), ()),
    (0x20, "MOV R5, 0x4", (("R", 5),), ()),
    (
        0x30,
        "IMAD.WIDE.U32 R2, R4, R5, c[0x0][0x168]",
        (("R", 2), ("R", 3)),
        (("R", 4), ("R", 5)),
    ),
    (0x40, "LDG.E.SYS R2, [R2]", (("R", 2),), (("R", 2), ("R", 3))),
    (
        0x50,
        "IMAD.WIDE.U32 R4, R4, R5, c[0x0][0x160]",
        (("R", 4), ("R", 5)),
        (("R", 4), ("R", 5)),
    ),
    (0x60, "MOVM.16.MT88 R7, R2", (("R", 7),), (("R", 2),)),
    (0x70, "STG.E.SYS [R4], R7", (), (("R", 4), ("R", 5), ("R", 7))),
    (0x80, "EXIT", (), ()),
    (0x90, "BRA `(.L_x_0)", (), ()),
]
"""(offset, text, defs, uses) of transpose_8x8 in tensor.sm_75.cubin, as nvdisasm marks them."""


def test_nvdisasm_listing_of_a_small_kernel() -> None:
    data = (catalogue.NVCC / "tensor.sm_75.cubin").read_bytes()
    cubin = Cubin.parse(data)
    listing = disassemble(cubin)["transpose_8x8"]
    assert [(r.offset, r.text, r.defs, r.uses) for r in listing.rows] == GOLDEN
    assert listing.labels[".L_x_0"] == 0x90
    start = next(t.file_offset for t in cubin.texts if t.name == "transpose_8x8")
    for row in listing.rows:
        at = start + row.offset
        assert int.from_bytes(data[at : at + 16], "little") == row.word


def test_many_registers_have_columns() -> None:
    """With up to 255 general registers the column headers have three digits."""
    data = (catalogue.NVCC / "pressure.sm_90.cubin").read_bytes()
    rows = disassemble(Cubin.parse(data))["tile_14x14"].rows
    numbers = {index for row in rows for file, index in row.defs if file == "R"}
    assert max(numbers) >= 200
    named = [row for row in rows if row.text.startswith("FFMA R2") and row.defs]
    assert named
    for row in named:
        assert row.defs[0] == ("R", int(row.text.split()[1].rstrip(",").split(".")[0][1:]))


def test_nvdisasm_is_started_once_for_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Sequence[str]] = []
    run = toolchain.run

    def counted(command: Sequence[str], tool: str) -> str:
        started.append(command)
        return run(command, tool)

    monkeypatch.setattr(toolchain, "run", counted)
    listing._run_tool.cache_clear()
    data = (catalogue.NVCC / "tensor.sm_75.cubin").read_bytes()
    first, second = Cubin.parse(data), Cubin.parse(bytes(bytearray(data)))
    assert disassemble(first) == disassemble(second)
    assert len(started) == 1
