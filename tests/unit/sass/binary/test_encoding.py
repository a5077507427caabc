"""Control words: encoding is lossless, fields are independent, illegal values are found."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.sass.binary.encoding import (
    CONTROL_MASK,
    FIELDS,
    NO_YIELD,
    PAYLOAD_MASK,
    READ_SB,
    REUSE,
    STALL,
    WAIT,
    WRITE_SB,
    BitField,
    Control,
    decode,
    encode,
    illegal_reason,
)

WORDS = st.integers(0, (1 << 128) - 1)
NAMES = {
    "stall": STALL,
    "write_sb": WRITE_SB,
    "read_sb": READ_SB,
    "wait": WAIT,
    "reuse": REUSE,
}


@given(WORDS)
def test_decode_and_encode_are_inverse(word: int) -> None:
    payload, control = decode(word)
    assert encode(payload, control) == word
    assert payload & CONTROL_MASK == 0
    assert payload == word & PAYLOAD_MASK


def test_the_fields_are_bits_105_to_124_and_do_not_overlap() -> None:
    assert sum(field.width for field in FIELDS) == 20
    assert CONTROL_MASK == ((1 << 20) - 1) << 105
    assert CONTROL_MASK ^ PAYLOAD_MASK == (1 << 128) - 1


@pytest.mark.parametrize("name", NAMES)
@given(word=WORDS, data=st.data())
def test_changing_a_field_changes_only_its_bits(name: str, word: int, data: st.DataObject) -> None:
    field = NAMES[name]
    value = data.draw(st.integers(0, (1 << field.width) - 1))
    payload, control = decode(word)
    changed = encode(payload, control.with_(**{name: value}))
    assert (changed ^ word) & ~field.mask == 0
    assert field.get(changed) == value
    assert getattr(decode(changed)[1], name) == value


@given(WORDS)
def test_yield_is_stored_inverted(word: int) -> None:
    payload, control = decode(word)
    flipped = encode(payload, control.with_(yields=not control.yields))
    assert flipped ^ word == NO_YIELD.mask
    assert control.yields == (NO_YIELD.get(word) == 0)


def test_words_of_compiled_code() -> None:
    # LDG.E.SYS R2, [R2]: scoreboard 2 on write, no wait, stall 1
    payload, control = decode(0x000EA200001EE900_0000000002027381)
    assert control == Control(stall=1, yields=False, write_sb=2)
    assert payload == 0x001EE900_0000000002027381
    # MOVM R7, R2 waits for scoreboard 2
    assert decode(0x004E2A0000000000_000000000207723A)[1].waits == (2,)


def test_field_positions() -> None:
    assert BitField(3, 2).mask == 0b11000
    assert BitField(3, 2).get(0b10000) == 0b10
    assert [decode(1 << bit)[1].stall for bit in (104, 105, 108, 109)] == [0, 1, 8, 0]


@pytest.mark.parametrize(
    ("control", "printed"),
    [
        (Control(4, False), "B------:R-:W-:-:S04"),
        (Control(0, True, 5, 0, 0b100001), "B0----5:R0:W5:Y:S00"),
        (Control(15, True, 1, 2, 0b000100, 0b111), "B--2---:R2:W1:Y:S15"),
    ],
)
def test_text_of_control_words(control: Control, printed: str) -> None:
    assert str(control) == printed


@pytest.mark.parametrize(
    ("control", "reason"),
    [
        *((Control(stall, False), None) for stall in range(1, 12)),
        (Control(0, False), "stall 0 without yield"),
        *((Control(stall, False), f"stall {stall} without yield") for stall in range(12, 16)),
        *((Control(stall, True), None) for stall in range(16)),
        (Control(4, True, reuse=1), "reuse flags together with yield"),
        (Control(4, False, reuse=7), None),
        *((Control(4, False, write_sb=sb), None) for sb in (0, 1, 2, 3, 4, 5, 7)),
        (Control(4, False, write_sb=6), "write scoreboard 6"),
        (Control(4, False, read_sb=6), "read scoreboard 6"),
        (Control(4, False, wait=0b111111), None),
    ],
)
def test_reasons_of_illegal_control_words(control: Control, reason: str | None) -> None:
    actual = illegal_reason(control)
    assert (actual is None) == (reason is None)
    assert reason is None or (actual is not None and reason in actual)


def test_the_batch_field_is_not_reuse() -> None:
    control = Control(4, True, reuse=3)
    assert illegal_reason(control) == "reuse flags together with yield; only one of them is allowed"
    assert illegal_reason(control, has_batch_field=True) is None


def test_stall_0_with_yield_drains() -> None:
    assert Control(0, True).drains
    assert not Control(0, False).drains
    assert not Control(1, True).drains
