"""Reader for Kineto traces (torch.profiler's ``export_chrome_trace``), in one streaming pass."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.files.text_blocks import Progress
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.event_columns import ColumnBuilder, event_remarks, spans
from nostall.workload.traces.kineto.schema import DeviceProperties, DistributedInfo, Metadata
from nostall.workload.traces.recording import TIME_UNIT, Recording
from nostall.workload.traces.stream import TraceFile, repair

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


class NoGpuActivity(BadTrace):
    """A trace has events, and none of them ran on a GPU."""


def read_kineto(path: Path, progress: Progress | None = None) -> Recording:
    """Read one trace, plain or gzipped; memory holds only GPU activities and calls on the host.

    Damaged events are skipped, and ``Recording.remarks`` counts them.  Raises
    :class:`~nostall.core.errors.BadTrace` if the file has no events (with the position of the
    damage), and :class:`NoGpuActivity` if none of them is a GPU activity.
    """
    file = TraceFile(path, progress)
    columns = ColumnBuilder()
    for events in file.event_lists(columns.decode):
        columns.add(events)
    columns.finish()
    if not columns.events:
        cause = "; ".join(file.remarks) or "the list is empty"
        raise BadTrace(f"{path}: no events: {cause}; record the trace again")
    if not columns.start:
        causes = (*file.remarks, *event_remarks(columns.unusable, columns.unknown_categories))
        cause = f" ({'; '.join(causes)})" if causes else ""
        raise NoGpuActivity(
            f"{path}: none of {pluralize(columns.events, 'event')} ran on a GPU{cause}; record the "
            "trace with ProfilerActivity.CUDA on a machine with a GPU"
        )
    metadata, damage = read_metadata(file.frame, is_complete=file.end_damage is None)
    return build_recording(
        path, columns, metadata, remarks=file.remarks, damage=[damage] if damage else ()
    )


def build_recording(
    path: Path,
    columns: ColumnBuilder,
    metadata: Metadata,
    remarks: Sequence[str],
    damage: Sequence[str] = (),
) -> Recording:
    """The recording of columns that have GPU activities, which are sorted by start."""
    rows = columns.usable_activities()
    rows = rows[np.argsort(np.array(columns.start)[rows], kind="stable")]
    # Times count from the epoch; subtracting before scaling keeps nanoseconds in a float64.
    origin = columns.start[rows[0]]
    distributed = metadata.distributed
    steps, step_thread = spans(columns.steps, origin)
    loading, loading_thread = spans(columns.loading, origin)
    return Recording(
        path=path,
        activities=columns.activities(rows, origin),
        calls=columns.calls(origin),
        names=tuple(columns.names),
        steps=steps,
        loading=loading,
        step_thread=step_thread,
        loading_thread=loading_thread,
        host=columns.host_calls(origin),
        host_names=tuple(columns.host_names),
        thread_process=np.array(columns.thread_process, dtype=np.int64),
        operator_costs=columns.operator_costs,
        origin=origin * TIME_UNIT,
        rank=distributed.rank if distributed else None,
        world_size=distributed.world_size if distributed else None,
        gpu=next((device.name for device in metadata.devices if device.name), "unknown GPU"),
        schema=metadata.schema,
        events=columns.events,
        unusable_events=columns.unusable.total(),
        remarks=(
            *remarks,
            *event_remarks(columns.unusable, columns.unknown_categories),
            *damage,
        ),
        groups=tuple(columns.groups),
    )
