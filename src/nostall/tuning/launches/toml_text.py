"""Text of a launch file, with comments: the inverse of :meth:`LaunchSpec.from_toml`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from nostall.core.launch import LaunchSpec
from nostall.core.text.terminal import escape_controls

_TOP_LEVEL = ("grid", "block", "cluster", "shared", "num_warps", "num_stages", "flops", "trips")
_ALWAYS = ("name", "dtype", "role")
"""Keys of an argument that are written even if they have their default."""


def launch_toml(
    launch: LaunchSpec,
    header: Sequence[str] = (),
    comments: Mapping[str, str] = MappingProxyType({}),
    keys: Sequence[str] = (),
) -> str:
    """The text of a launch file.

    ``header``: lines of comment at the top.  ``comments``: a comment behind a top-level key, or
    before the argument of this name.  ``keys``: top-level keys to write even if they have their
    default.
    """
    lines = [_comment(line) for line in header]
    fields = LaunchSpec.model_fields
    for key in _TOP_LEVEL:
        value = getattr(launch, key)
        default = fields[key].get_default(call_default_factory=True)
        if value != default or key in keys:
            note = f"  {_comment(comments[key])}" if key in comments else ""
            lines.append(f"{key} = {_value(value)}{note}")
    for argument in launch.args:
        lines.append("")
        if argument.name in comments:
            lines += [_comment(line) for line in comments[argument.name].splitlines()]
        lines += ["[[args]]", *_table(argument)]
    for shape in launch.shapes:
        lines += ["", "[[shapes]]", *_table(shape)]
    return "\n".join(lines) + "\n"


def _table(model: BaseModel) -> Iterator[str]:
    """The keys of a table that differ from their defaults, and those that say what it is."""
    for key, field in type(model).model_fields.items():
        value = getattr(model, key)
        default = field.get_default(call_default_factory=True)
        if value is not None and (field.is_required() or key in _ALWAYS or value != default):
            yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(item)}" for key, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def _key(key: Any) -> str:
    text = str(key)
    is_bare = text.isascii() and text.replace("_", "").replace("-", "").isalnum()
    return text if is_bare else json.dumps(text)


def _comment(text: str) -> str:
    return f"# {escape_controls(text)}".rstrip()
