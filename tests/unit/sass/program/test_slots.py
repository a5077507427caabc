"""Operand slots, compared with the operands that nvdisasm marks as reused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nostall.sass.binary import toolchain
from nostall.sass.binary.encoding import WORD_BYTES, Control, encode
from nostall.sass.program.instruction import Instruction, parse_text
from nostall.sass.program.registers import SLOTS, slot_register

REGISTERS = {24: 20, 32: 32, 64: 44}
"""Lowest bit of a field -> the register that the tests put there."""
NAMES = {24: "R20", 32: "R32", 64: "R44"}

ROWS = """
DADD   | a-c | 24 64    | 0xa0000000004047229
DMUL   | ab- | 24 32    | 0x204087228
DFMA   | abc | 24 32 64 | 0x8000000040a04722b
DSETP  | a-c | 24 32    | 0x3f0e000000000ff0400722a
FADD   | a-c | 24 32    | 0x5007221
FFMA   | abc | 24 32 64 | 0x20000000505027223
HSET2  | a-c | 24 32    | 0x38040800000000706077233
HSETP2 | a-c | 24 32    | 0x3f04a00200000ff05007234
IADD3  | abc | 24 32 64 | 0x7ffe0ff0000000300027210
ISETP  | ab- | 24 32    | 0x3f26270000000031600720c
IABS   | -b- | 32       | 0x300097213
MOV    | -b- | 32       | 0xf000000000900057202
PRMT   | abc | 24 32 64 | 0x60000000803087216
"""
"""Mnemonic | slots that have an operand | fields of registers | word of compiled sm_90 code."""

OTHER_WORDS = {
    75: {"IADD3": 0x1FFE4FF0000000BFF0B7210, "FADD": 0x704077221},
    80: {"IADD3": 0x7FFE0FF0000000300027210, "FADD": 0x5007221},
    100: {"IADD3": 0x7FFE0FF0000000700077210},
    120: {"FADD": 0x704077221, "FFMA": 0x1090000000000037223, "IABS": 0x500007213,
          "ISETP": 0x3F05270000000FF0000720C, "MOV": 0xF000000000300047202,
          "IADD3": 0x7FFE0FF0000000700077210, "PRMT": 0x80000000607097216},
}  # fmt: skip
"""Architecture -> mnemonic -> word; except on sm_120 the others are those of sm_90."""

Sample = tuple[str, str, list[int], int]


def samples(sm: int) -> list[Sample]:
    """(mnemonic, slots, fields, word with the test's registers) of an architecture."""
    rows: list[Sample] = []
    for line in ROWS.strip().splitlines():
        base, slots, fields, number = (part.strip() for part in line.split("|"))
        others = OTHER_WORDS.get(sm, {})
        if sm == 120 and base not in others:
            continue
        places = [int(field) for field in fields.split()]
        code = others.get(base, int(number, 16))
        for low in places:
            code = code & ~(0xFF << low) | REGISTERS[low] << low
        rows.append((base, slots, places, code))
    return rows


def disassembled(codes: list[int], sm: int, folder: Path) -> list[str]:
    file = folder / "words.bin"
    file.write_bytes(b"".join(code.to_bytes(WORD_BYTES, "little") for code in codes))
    command = [str(toolchain.find("nvdisasm")), "-b", f"SM{sm}", str(file)]
    rows = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", toolchain.run(command, "nvdisasm"))
    return [text for _, text in rows]


@pytest.mark.parametrize("sm", [75, 80, 90, 100, 120])
def test_the_operand_in_a_slot_is_the_one_that_nvdisasm_marks(sm: int, tmp_path: Path) -> None:
    flagged = [
        (sample, slot) for sample in samples(sm) for slot in range(3) if SLOTS[slot] in sample[1]
    ]
    codes = [encode(code, Control(5, False, reuse=1 << slot)) for (*_, code), slot in flagged]
    texts = disassembled(codes, sm, tmp_path)
    assert len(texts) >= len(flagged) > 14
    for ((base, _, _, code), slot), text in zip(flagged, texts, strict=False):
        marked = re.findall(r"(R\d+)[^,\s]*\.reuse", text)
        register = slot_register(instruction(base, code, text), slot)
        assert register is not None and marked == [f"R{register}"], text


@pytest.mark.parametrize("sm", [75, 80, 90, 100, 120])
def test_slots_without_an_operand_have_no_register(sm: int) -> None:
    for base, slots, places, code in samples(sm):
        operands = ", ".join(NAMES[low] for low in places)
        for slot in range(3):
            if SLOTS[slot] not in slots:
                assert slot_register(instruction(base, code, f"{base} {operands}"), slot) is None


def instruction(base: str, code: int, text: str) -> Instruction:
    """An instruction with this word that reads the registers in its text."""
    uses = tuple(int(number) for number in re.findall(r"\bR(\d+)", text))
    guard, opcode, operands = parse_text(text)
    assert opcode.split(".")[0] == base
    return Instruction(
        0, text, code, Control(1, False), opcode, guard, operands, (), uses, (), frozenset()
    )
