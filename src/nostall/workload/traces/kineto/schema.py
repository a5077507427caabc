"""Schema of the JSON of a Kineto trace: only the fields that the reader uses.

The metadata is in the text before and after the events.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from nostall.workload.traces.stream import repair

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


@dataclass(frozen=True, slots=True)
class Metadata:
    """The fields of the trace object other than ``traceEvents``."""

    schema: int | None = None
    rank: int | None = None
    world_size: int | None = None
    gpu: str = "unknown GPU"
    """Name of the first GPU that has one."""


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
        elif name == "dtype":
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


DAMAGE = "the text before or after the events is not valid JSON; its readable fields are used"
_FIELDS = ("schemaVersion", "distributedInfo", "deviceProperties")
_JSON = json.JSONDecoder()


def read_metadata(frame: bytes, *, is_complete: bool) -> tuple[Metadata, str | None]:
    """The metadata in the text around the events, and a remark if that text is damaged.

    ``is_complete`` says whether the list of events ended; otherwise the text has no end either.
    """
    text, is_json = repair(frame)[0].decode(), _is_json(frame)
    table = json.loads(text) if is_json else None
    if not isinstance(table, dict):
        table = {name: _find_field(text, name) for name in _FIELDS}
    is_bare_list = re.fullmatch(rb"\s*\[\s*\]?\s*", frame) is not None
    is_sound = is_json or is_bare_list or not is_complete
    return _metadata(table), None if is_sound else DAMAGE


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _find_field(text: str, name: str) -> Any:
    """The value of a field that can be anywhere in a damaged text; None if it is not readable."""
    for match in re.finditer(rf'"{name}"\s*:\s*', text):
        try:
            return _JSON.raw_decode(text, match.end())[0]
        except (ValueError, RecursionError):
            continue
    return None


def _metadata(fields: dict[str, Any]) -> Metadata:
    """Metadata without the fields that have wrong types."""
    info, devices = fields.get("distributedInfo"), fields.get("deviceProperties")
    info = info if isinstance(info, dict) else {}
    devices = devices if isinstance(devices, list) else []
    names = [device.get("name") for device in devices if isinstance(device, dict)]
    return Metadata(
        _integer(fields.get("schemaVersion")),
        _integer(info.get("rank")),
        _integer(info.get("world_size")),
        next((name for name in names if name and isinstance(name, str)), Metadata().gpu),
    )


def _integer(value: object) -> int | None:
    """A whole number, also from text; None for other values and from 2^31 on."""
    try:
        number = int(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1 << 31 else None
