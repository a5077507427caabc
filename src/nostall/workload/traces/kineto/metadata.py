"""Metadata of a Kineto trace, from the text before and after its events."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from nostall.workload.traces.kineto.schema import DeviceProperties, DistributedInfo, Metadata
from nostall.workload.traces.stream import repair

DAMAGE = "the text before or after the events is not valid JSON; its readable fields are used"
_FIELDS = ("schemaVersion", "distributedInfo", "deviceProperties")
_JSON = json.JSONDecoder()
_MAX_DEVICES = 4096


def read_metadata(frame: bytes, *, is_complete: bool) -> tuple[Metadata, str | None]:
    """The metadata in the text around the events, and a remark if that text is damaged.

    ``is_complete`` says whether the list of events ended; otherwise the text has no end either.
    """
    try:
        metadata = msgspec.json.decode(frame, type=Metadata)
        if _has_plausible_numbers(metadata):
            return metadata, None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    is_bare_list = re.fullmatch(rb"\s*\[\s*\]?\s*", frame) is not None
    is_json = not is_complete or is_bare_list or _is_json(frame)
    text = repair(frame)[0].decode()
    fields = {name: _find_field(text, name) for name in _FIELDS}
    return _lenient_metadata(fields), None if is_json else DAMAGE


def _has_plausible_numbers(metadata: Metadata) -> bool:
    info = metadata.distributed or DistributedInfo()
    numbers = (metadata.schema, info.rank, info.world_size)
    return all(n is None or _integer(n) == n for n in numbers)


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


def _lenient_metadata(fields: dict[str, Any]) -> Metadata:
    """Metadata without the fields that have wrong types."""
    info, devices = fields["distributedInfo"], fields["deviceProperties"]
    distributed = None
    if isinstance(info, dict):
        backend = info.get("backend")
        distributed = DistributedInfo(
            _integer(info.get("rank")),
            _integer(info.get("world_size")),
            backend if isinstance(backend, str) else None,
        )
    names = [
        DeviceProperties(_integer(device.get("id")), device["name"])
        for device in (devices if isinstance(devices, list) else [])[:_MAX_DEVICES]
        if isinstance(device, dict) and isinstance(device.get("name"), str)
    ]
    return Metadata(_integer(fields["schemaVersion"]), distributed, names)


def _integer(value: object) -> int | None:
    """A number that may be text; None for other values and for absurd numbers."""
    try:
        number = int(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None
    return number if number is not None and abs(number) < 1 << 31 else None
