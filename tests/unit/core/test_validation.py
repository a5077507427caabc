"""Texts that are no JSON or TOML raise one kind of error."""

from __future__ import annotations

import pytest

from nostall.core.validation import parse_json, parse_toml

DIGITS = "9" * 5000


def test_texts_are_parsed() -> None:
    assert parse_json('{"a": [1, 2.5]}') == {"a": [1, 2.5]}
    assert parse_json(b"[]") == []
    assert parse_toml("a = [1, 2.5]") == {"a": [1, 2.5]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[" * 100_000, "nested too deeply"),
        (f"[{DIGITS}]", "a number has more than 4300 digits"),
        (b"\xff", "codec can't decode"),
    ],
)
def test_a_text_that_is_no_json(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a =", "Invalid value"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        (f"a = {DIGITS}", "a number has more than 4300 digits"),
    ],
)
def test_a_text_that_is_no_toml(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_toml(text)
