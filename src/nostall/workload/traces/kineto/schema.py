"""Schema of the JSON of a Kineto trace: only the fields that the reader uses."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec

Scalar = int | float | str | None
"""A field that is a number; profilers also write numbers as text."""
_MISSING = msgspec.Raw()
MAX_ID = 1 << 62
"""Ids from here on are given to values that are not numbers or do not fit in 64 bits."""
_PRINTABLE = dict.fromkeys((*range(32), 127, *range(128, 160)), "�")


class EventArguments(msgspec.Struct, gc=False):
    """``args`` of a GPU activity, a runtime call or an operator."""

    stream: Scalar = None
    device: Scalar = None
    correlation: Scalar = None
    correlation_id: Scalar = None
    """The same in traces of JAX and TensorFlow."""
    external_id: Scalar = msgspec.field(name="External id", default=None)
    step_num: Scalar = None
    """Number of a step that JAX marks."""
    name: Scalar = None
    """Name of a process or thread, in a metadata event."""
    labels: Scalar = None
    bytes: Scalar = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    message_elements: Scalar = msgspec.field(name="In msg nelems", default=None)
    dtype: str | None = None
    group: Scalar = msgspec.field(name="Process Group Name", default=None)
    group_ranks: msgspec.Raw = msgspec.field(name="Process Group Ranks", default=_MISSING)
    sequence: Scalar = msgspec.field(name="Seq", default=None)
    input_shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=_MISSING)
    input_dtypes: msgspec.Raw = msgspec.field(name="Input type", default=_MISSING)
    input_values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=_MISSING)


class Event(msgspec.Struct, gc=False):
    """An entry of ``traceEvents``; ``ts`` and ``dur`` are microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str | int | None = None
    ts: float | str | None = None
    dur: float | str | None = None
    pid: int | str | None = None
    tid: int | str | None = None
    args: EventArguments | None = None


class DistributedInfo(msgspec.Struct):
    """``distributedInfo`` of a trace."""

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None


class DeviceProperties(msgspec.Struct):
    """An entry of ``deviceProperties``."""

    id: int | None = None
    name: str | None = None


class Metadata(msgspec.Struct):
    """The fields of the trace object other than ``traceEvents``."""

    schema: int | None = msgspec.field(name="schemaVersion", default=None)
    distributed: DistributedInfo | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[DeviceProperties] = msgspec.field(name="deviceProperties", default_factory=list)


def lenient_event(text: bytes) -> Event | None:
    """The event of a JSON text in which fields have wrong types; such fields are missing.

    None if the text is not a JSON object.
    """
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return Event(
        ph=fields["ph"] if isinstance(fields.get("ph"), str) else "",
        cat=fields["cat"] if isinstance(fields.get("cat"), str) else None,
        name=_text(fields.get("name")),
        ts=_scalar(fields.get("ts")),
        dur=_scalar(fields.get("dur")),
        pid=_identity(fields.get("pid")),
        tid=_identity(fields.get("tid")),
        args=_lenient_arguments(fields.get("args")),
    )


def _lenient_arguments(value: object) -> EventArguments | None:
    if not isinstance(value, dict):
        return None
    fields: dict[str, Any] = {}
    for name, key in zip(
        EventArguments.__struct_fields__, EventArguments.__struct_encode_fields__, strict=True
    ):
        if key not in value:
            continue
        if name.startswith("input_") or name == "group_ranks":
            fields[name] = msgspec.Raw(json.dumps(value[key]).encode())
        elif name in ("collective", "dtype"):
            fields[name] = _text(value[key])
        else:
            fields[name] = _scalar(value[key])
    return EventArguments(**fields)


def _scalar(value: object) -> float | str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, int | float | str) else None


def _identity(value: object) -> int | str | None:
    """A number of a process or thread as it is, so that it equals that of other events."""
    return value if isinstance(value, int) else _text(value)


def _text(value: object) -> str | None:
    """Text without lone surrogates, which cannot be printed."""
    return None if value is None else str(value).encode(errors="replace").decode()


def parse_number(value: Scalar) -> float | None:
    """A finite number, also from text; None if it is missing or not finite."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if value is None:
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def printable(name: str | int | None) -> str:
    """A name without control characters."""
    return "(no name)" if name is None else str(name).translate(_PRINTABLE)


def parse_integer(value: Scalar) -> int | None:
    """A whole number, also from text such as 'stream 7'; None for other values."""
    if isinstance(value, float):
        return int(value) if value == value // 1 and abs(value) < MAX_ID else None
    text = str(value).strip().lower().removeprefix("stream").strip()
    try:
        return int(text) if len(text) <= 20 else None
    except ValueError:
        return None


def parse_amount(value: Scalar) -> float:
    """A number of 0 or more, also from text; 0 for other values."""
    return max(parse_number(value) or 0.0, 0.0)
