"""Parse JSON and TOML with one kind of error, and describe errors of pydantic in plain words."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from nostall.core.text.suggest import did_you_mean
from nostall.core.text.terminal import escape_controls

Model = TypeVar("Model", bound=BaseModel)

_MAX_VALUE = 60
"""Characters of a value in a message."""
_SCALARS = ("float", "int", "str", "bool")
"""Pydantic's names of the members of a union such as ``float | int``."""
_KINDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "string_type": "text in quotes",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "tuple_type": "a list in square brackets",
    "list_type": "a list in square brackets",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "finite_number": "a finite number",
}
"""What is allowed, by the type of pydantic's error."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises :class:`ValueError` for any other text; values that are nested too deeply and numbers of
    thousands of digits count as such.
    """
    return _parse(json.loads, text)


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text; raises :class:`ValueError` as :func:`parse_json` does."""
    table: dict[str, Any] = _parse(tomllib.loads, text)
    return table


def _parse(parse: Callable[[Any], Any], text: str | bytes) -> Any:
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise
    except ValueError:  # the text is right, and Python refuses the conversion
        digits = sys.get_int_max_str_digits()
        raise ValueError(f"a number has more than {digits} digits") from None


def dump_json(model: BaseModel) -> str:
    """The JSON text of a model, which :func:`load_json` reads.

    Bytes of file names that are not UTF-8 become escapes such as ``\\udcff``.
    """
    try:
        return model.model_dump_json(indent=1)
    except PydanticSerializationError:  # pydantic writes UTF-8 only
        return json.dumps(model.model_dump(mode="json"), indent=1)


def load_json(model: type[Model], text: str | bytes) -> Model:
    """The model of a JSON text.  Raises :class:`pydantic.ValidationError` for another text."""
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        if "surrogate" not in str(error):  # pydantic does not read the escapes of `dump_json`
            raise
        return model.model_validate(parse_json(text))


def first_problem(error: ValidationError, whole: str = "the file") -> str:
    """Place and message of the first error, in pydantic's words; ``whole`` is the place of none."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """The first error of a validation of ``model`` as one sentence, without pydantic's terms."""
    first: Mapping[str, Any] = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"] if not _is_tag(part)]
    where = escape_controls(".".join(path)) or "the file"
    kind = str(first["type"])
    describe = _DESCRIPTIONS.get(kind, _describe_other)
    return describe(where, path, first, model)


Describe = Callable[[str, list[str], Mapping[str, Any], type[BaseModel]], str]


def _is_tag(part: object) -> bool:
    """Whether a part of an error's place names a member of a union, not a key."""
    return isinstance(part, str) and (part in _SCALARS or part.startswith("<"))


def _unknown_key(
    where: str, path: list[str], first: Mapping[str, Any], model: type[BaseModel]
) -> str:
    allowed = _keys(model, first["loc"][:-1])
    names = f"; allowed are {', '.join(allowed)}" if allowed else ""
    return f"{where} is an unknown key{names}{did_you_mean(path[-1], allowed)}"


def _missing(where: str, path: list[str], first: Mapping[str, Any], model: type[BaseModel]) -> str:
    if path[-1].isdecimal():
        name, count = ".".join(path[:-1]), len(first["input"])
        return f"{name} has {count} entries; more are needed"
    return f"{where} is missing"


def _literal(where: str, path: list[str], first: Mapping[str, Any], model: type[BaseModel]) -> str:
    text = str(first["ctx"]["expected"]).replace(" or ", ", ")
    allowed = [name.strip().strip("'") for name in text.split(",")]
    value = str(first["input"])
    near = did_you_mean(value, allowed)
    return f"{where} is {_show(value)}; allowed are {', '.join(allowed)}{near}"


def _too_many(where: str, path: list[str], first: Mapping[str, Any], model: type[BaseModel]) -> str:
    context = first["ctx"]
    return f"{where} has {context['actual_length']} entries; allowed are {context['max_length']}"


def _our_own(where: str, path: list[str], first: Mapping[str, Any], model: type[BaseModel]) -> str:
    """A message that one of nostall's validators raised."""
    text = str(first["ctx"]["error"])
    return text if where == "the file" else f"{where}: {text}"


def _describe_other(
    where: str, path: list[str], first: Mapping[str, Any], model: type[BaseModel]
) -> str:
    allowed = _KINDS.get(str(first["type"]))
    if allowed is None:
        text = str(first["msg"])
        return f"{where} is {_show(first['input'])}: {text[:1].lower()}{text[1:]}"
    return f"{where} is {_show(first['input'])}; allowed is {allowed}"


_DESCRIPTIONS: dict[str, Describe] = {
    "extra_forbidden": _unknown_key,
    "missing": _missing,
    "literal_error": _literal,
    "too_long": _too_many,
    "value_error": _our_own,
}


def _show(value: object) -> str:
    text = escape_controls(repr(value))
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _keys(model: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """The keys of the table at ``path`` below a model; empty if it has no fixed keys."""
    current: Any = model
    for part in path:
        if isinstance(part, int):
            continue
        if _is_tag(part):
            current = _TAGGED.get(part, current)
        elif isinstance(current, type) and issubclass(current, BaseModel):
            field = current.model_fields.get(part)
            current = _inner_model(field.annotation) if field is not None else None
    if isinstance(current, type) and issubclass(current, BaseModel):
        return list(current.model_fields)
    return []


_TAGGED: dict[str, type[BaseModel]] = {}
"""Models of unions by their tag."""


def register_tag(tag: str, model: type[BaseModel]) -> str:
    """Name a member of a union, so that errors can list its keys; returns the tag."""
    _TAGGED[tag] = model
    return tag


def _inner_model(annotation: Any) -> Any:
    """The model inside an annotation such as ``tuple[Model, ...]``, or None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        if isinstance(argument, type) and issubclass(argument, BaseModel):
            return argument
    return None
