"""Recorded instruction offsets: known layouts give places, unknown ones pin."""

from __future__ import annotations

import struct

import pytest
from tests.unit.sass.binary.cubin_builder import attribute, elf, info, text

from nostall.core.errors import BadBinary
from nostall.sass.binary.attributes import NO_OFFSETS, OFFSET_LISTS, attributes, offset_records
from nostall.sass.binary.elf import Elf

SIZE = 0x100


def read(*entries: bytes) -> tuple[Elf, list[tuple[int, int, int, bool, str]], set[int]]:
    """Records as (place in the section, offset, width, fixed, source), and pins."""
    parsed = Elf.parse(elf(text(SIZE // 16), info(*entries)))
    section = parsed.sections[2]
    records, pinned = offset_records(parsed, section, SIZE)
    places = [(r.at - section.offset, r.offset, r.width, r.fixed, r.source) for r in records]
    for record in records:
        assert struct.unpack_from("<I", parsed.data, record.at) == (record.offset,)
    return parsed, places, pinned


@pytest.mark.parametrize("code", OFFSET_LISTS)
def test_lists_of_offsets(code: int) -> None:
    _, records, pinned = read(attribute(code, 0x10, 0xF0))
    name = OFFSET_LISTS[code]
    assert records == [(4, 0x10, 4, False, name), (8, 0xF0, 4, False, name)]
    assert pinned == set()


def test_records_of_several_entries_keep_their_places() -> None:
    _, records, _ = read(attribute(0x1C, 0x20), attribute(0x04, 0x30), attribute(0x28, 0x40, 0x50))
    assert [(at, offset) for at, offset, *_ in records] == [(4, 0x20), (20, 0x40), (24, 0x50)]


def test_mbarrier_records_have_four_words() -> None:
    entry = attribute(0x39, 0x10, 0xFF, 0x20, 0x00010100, 0x30, 0x4, 0x40, 0x00020100)
    _, records, pinned = read(entry)
    assert [(at, offset) for at, offset, *_ in records] == [(4, 0x10), (20, 0x30)]
    assert {source for *_, source in records} == {"MBARRIER_INSTR_OFFSETS"}
    assert pinned == set()


def test_mbarrier_records_of_another_length_pin_all_they_may_name() -> None:
    _, records, pinned = read(attribute(0x39, 0x10, 0x21, 0x20))
    assert records == []
    assert pinned == {0x10, 0x20}


def test_indirect_branches_name_a_branch_and_fixed_targets() -> None:
    entry = attribute(0x34, 0x80, 0, 2, 0x10, 0x20, 0x90, 0, 1, 0x30)
    _, records, pinned = read(entry)
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
def test_damaged_indirect_branches_pin(values: tuple[int, ...], pins: set[int]) -> None:
    _, records, pinned = read(attribute(0x34, *values))
    assert records == []
    assert pinned == pins


def test_an_unknown_attribute_pins_what_may_be_an_offset() -> None:
    assert 0x7E not in NO_OFFSETS
    _, records, pinned = read(attribute(0x7E, 0x10, 0x18, 0x1000, 0xF0, SIZE))
    assert records == []
    assert pinned == {0x10, 0xF0}


@pytest.mark.parametrize("value", [0x18, SIZE, 0xFFFFFFF0])
def test_a_list_with_a_value_that_is_no_offset_pins_the_others(value: int) -> None:
    _, records, pinned = read(attribute(0x1C, 0x20, value))
    assert records == []
    assert pinned == {0x20}


def test_a_payload_that_is_not_whole_words_pins() -> None:
    entry = struct.pack("<BBH", 4, 0x1C, 6) + struct.pack("<IH", 0x40, 0)
    _, records, pinned = read(entry)
    assert records == []
    assert pinned == {0x40}


def test_attributes_without_offsets_give_nothing() -> None:
    entries = [attribute(code, 0x10, 0x20) for code in sorted(NO_OFFSETS)]
    _, records, pinned = read(*entries)
    assert (records, pinned) == ([], set())


def test_no_code_is_both_with_and_without_offsets() -> None:
    assert not NO_OFFSETS & {*OFFSET_LISTS, 0x34, 0x39}


def test_the_four_formats() -> None:
    raw = b"\x01\x36\0\0" + b"\x02\x2a\x07\0" + b"\x03\x1b\xff\0" + attribute(0x1C, 0x10)
    parsed = Elf.parse(elf(text(), info(raw)))
    found = list(attributes(parsed, parsed.sections[2]))
    assert [(a.format, a.code, len(a.payload)) for a in found] == [
        (1, 0x36, 0),
        (2, 0x2A, 0),
        (3, 0x1B, 0),
        (4, 0x1C, 4),
    ]
    assert parsed.data[found[3].at : found[3].at + 4] == found[3].payload


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"\x04\x1c\x04", "ends inside an attribute at byte 0"),
        (attribute(0x1C, 1) + b"\x04", "ends inside an attribute at byte 8"),
        (b"\x04\x1c\x08\0" + b"\0" * 4, r"format 4, size 8\) at byte 0"),
        (b"\x04\x1c\xff\xff", "size 65535"),
        (b"\x05\x1c\x04\0" + b"\0" * 4, "format 5"),
        (b"\0\0\0\0", "format 0"),
    ],
)
def test_damaged_sections(raw: bytes, said: str) -> None:
    parsed = Elf.parse(elf(text(), info(raw)))
    with pytest.raises(BadBinary, match=said):
        list(attributes(parsed, parsed.sections[2]))
