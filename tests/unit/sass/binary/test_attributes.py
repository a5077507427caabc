"""Offsets in ``.nv.info``: known layouts give records, unknown layouts pin instructions."""

from __future__ import annotations

import struct

import pytest
from tests.unit.sass.binary.cubin_builder import attribute, elf, info, text

from nostall.core.errors import BadBinary
from nostall.sass.binary.attributes import (
    ATTRIBUTES_WITHOUT_OFFSETS,
    OFFSET_LIST_ATTRIBUTES,
    offset_records,
    parse_attributes,
)
from nostall.sass.binary.elf import Elf

SIZE = 0x100


def parse(*entries: bytes) -> tuple[Elf, list[tuple[int, int, int, bool, str]], set[int]]:
    """Parse these attributes: (file, records, pinned offsets).

    A record is (position in the section, offset, width, whether it is a branch target, source).
    """
    parsed = Elf.parse(elf(text(SIZE // 16), info(*entries)))
    section = parsed.sections[2]
    records, pinned = offset_records(parsed, section, SIZE)
    places = [
        (r.file_offset - section.offset, r.offset, r.width, r.is_branch_target, r.source)
        for r in records
    ]
    for record in records:
        assert struct.unpack_from("<I", parsed.data, record.file_offset) == (record.offset,)
    return parsed, places, pinned


@pytest.mark.parametrize("code", OFFSET_LIST_ATTRIBUTES)
def test_offset_list_attributes_give_a_record_for_each_offset(code: int) -> None:
    _, records, pinned = parse(attribute(code, 0x10, 0xF0))
    name = OFFSET_LIST_ATTRIBUTES[code]
    assert records == [(4, 0x10, 4, False, name), (8, 0xF0, 4, False, name)]
    assert pinned == set()


def test_records_of_several_attributes_have_their_file_positions() -> None:
    _, records, _ = parse(attribute(0x1C, 0x20), attribute(0x04, 0x30), attribute(0x28, 0x40, 0x50))
    assert [(at, offset) for at, offset, *_ in records] == [(4, 0x20), (20, 0x40), (24, 0x50)]


def test_mbarrier_records_have_four_words() -> None:
    entry = attribute(0x39, 0x10, 0xFF, 0x20, 0x00010100, 0x30, 0x4, 0x40, 0x00020100)
    _, records, pinned = parse(entry)
    assert [(at, offset) for at, offset, *_ in records] == [(4, 0x10), (20, 0x30)]
    assert {source for *_, source in records} == {"MBARRIER_INSTR_OFFSETS"}
    assert pinned == set()


def test_mbarrier_records_of_wrong_length_pin_all_possible_offsets() -> None:
    _, records, pinned = parse(attribute(0x39, 0x10, 0x21, 0x20))
    assert records == []
    assert pinned == {0x10, 0x20}


def test_indirect_branch_records_name_a_branch_and_its_targets() -> None:
    entry = attribute(0x34, 0x80, 0, 2, 0x10, 0x20, 0x90, 0, 1, 0x30)
    _, records, pinned = parse(entry)
    assert [(at, offset, fixed) for at, offset, _, fixed, _ in records] == [
        (4, 0x80, False),
        (16, 0x10, True),
        (20, 0x20, True),
        (24, 0x90, False),
        (36, 0x30, True),
    ]
    assert pinned == set()


@pytest.mark.parametrize(
    ("values", "pins"),
    [
        ((0x80, 1, 1, 0x10), {0x80, 0x10}),  # the second word is not 0
        ((0x80, 0, 5, 0x10), {0x80, 0x00, 0x10}),  # more targets than words
        ((0x80, 0, 0xFFFFFFFF, 0x10), {0x80, 0x00, 0x10}),  # absurd count
        ((0x80, 0), {0x80, 0x00}),  # cut off
    ],
)
def test_damaged_indirect_branch_records_pin_all_possible_offsets(
    values: tuple[int, ...], pins: set[int]
) -> None:
    _, records, pinned = parse(attribute(0x34, *values))
    assert records == []
    assert pinned == pins


def test_an_unknown_attribute_pins_all_possible_offsets() -> None:
    assert 0x7E not in ATTRIBUTES_WITHOUT_OFFSETS
    _, records, pinned = parse(attribute(0x7E, 0x10, 0x18, 0x1000, 0xF0, SIZE))
    assert records == []
    assert pinned == {0x10, 0xF0}


@pytest.mark.parametrize("value", [0x18, SIZE, 0xFFFFFFF0])
def test_a_list_with_an_impossible_offset_pins_the_others(value: int) -> None:
    _, records, pinned = parse(attribute(0x1C, 0x20, value))
    assert records == []
    assert pinned == {0x20}


def test_a_payload_with_a_partial_word_pins_its_complete_words() -> None:
    entry = struct.pack("<BBH", 4, 0x1C, 6) + struct.pack("<IH", 0x40, 0)
    _, records, pinned = parse(entry)
    assert records == []
    assert pinned == {0x40}


def test_attributes_without_offsets_give_no_records_or_pins() -> None:
    entries = [attribute(code, 0x10, 0x20) for code in sorted(ATTRIBUTES_WITHOUT_OFFSETS)]
    _, records, pinned = parse(*entries)
    assert (records, pinned) == ([], set())


def test_no_attribute_is_both_with_and_without_offsets() -> None:
    assert not ATTRIBUTES_WITHOUT_OFFSETS & {*OFFSET_LIST_ATTRIBUTES, 0x34, 0x39}


def test_the_four_attribute_formats() -> None:
    raw = b"\x01\x36\0\0" + b"\x02\x2a\x07\0" + b"\x03\x1b\xff\0" + attribute(0x1C, 0x10)
    parsed = Elf.parse(elf(text(), info(raw)))
    entries = list(parse_attributes(parsed, parsed.sections[2]))
    assert [(a.format, a.code, len(a.payload)) for a in entries] == [
        (1, 0x36, 0),
        (2, 0x2A, 0),
        (3, 0x1B, 0),
        (4, 0x1C, 4),
    ]
    assert parsed.data[entries[3].file_offset : entries[3].file_offset + 4] == entries[3].payload


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"\x04\x1c\x04", "ends inside an attribute at byte 0"),
        (attribute(0x1C, 1) + b"\x04", "ends inside an attribute at byte 8"),
        (b"\x04\x1c\x08\0" + b"\0" * 4, r"format 4, size 8\) at byte 0"),
        (b"\x04\x1c\xff\xff", "size 65535"),
        (b"\x05\x1c\x04\0" + b"\0" * 4, "format 5"),
        (b"\0\0\0\0", "format 0"),
    ],
)
def test_damaged_attribute_sections_are_rejected(raw: bytes, message: str) -> None:
    parsed = Elf.parse(elf(text(), info(raw)))
    with pytest.raises(BadBinary, match=message):
        list(parse_attributes(parsed, parsed.sections[2]))
