"""Texts that are no JSON or TOML raise one kind of error."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError

from nostall.core.validation import dump_json, explain, load_json, parse_json, parse_toml

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


class Inner(BaseModel, extra="forbid"):
    """A table with one key."""

    width: int = 0


class Outer(BaseModel, extra="forbid"):
    """Tables in several kinds of fields."""

    plain: Inner = Inner()
    first: Inner | None = None
    last: Inner | None = None
    pair: tuple[int, Inner] = (0, Inner())
    many: list[Inner] = []
    scalar: int = 0


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"plain": {"widht": 1}}, "plain.widht"),
        ({"first": {"widht": 1}}, "first.widht"),
        ({"last": {"widht": 1}}, "last.widht"),
        ({"pair": [1, {"widht": 1}]}, "pair.1.widht"),
        ({"many": [{}, {"widht": 1}]}, "many.1.widht"),
    ],
)
def test_unknown_keys_of_inner_tables_are_listed(value: dict[str, object], place: str) -> None:
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(value)
    assert explain(error.value, Outer) == (
        f"{place} is an unknown key; allowed are width; did you mean 'width'?"
    )


def test_json_of_models_has_one_line_for_each_key() -> None:
    """Also with bytes of file names that are not UTF-8; people read and compare these files."""

    class Named(BaseModel):
        name: str
        inner: Inner = Inner()

    texts = {name: dump_json(Named(name=name)) for name in ("a", "a\udcff")}
    assert texts["a"] == '{\n "name": "a",\n "inner": {\n  "width": 0\n }\n}'
    assert texts["a\udcff"] == texts["a"].replace('"a"', '"a\\udcff"')
    assert all(load_json(Named, text).name == name for name, text in texts.items())
