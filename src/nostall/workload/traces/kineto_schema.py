"""Schema of the JSON of a Kineto trace: only the fields that the reader uses."""

from __future__ import annotations

import msgspec

_MISSING = msgspec.Raw()


class EventArguments(msgspec.Struct, gc=False):
    """``args`` of a GPU activity, a runtime call or an operator."""

    stream: int | str | None = None
    device: int | str | None = None
    correlation: int | None = None
    external_id: int | None = msgspec.field(name="External id", default=None)
    bytes: float | None = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    message_elements: float | None = msgspec.field(name="In msg nelems", default=None)
    dtype: str | None = None
    input_shapes: msgspec.Raw = msgspec.field(name="Input Dims", default=_MISSING)
    input_dtypes: msgspec.Raw = msgspec.field(name="Input type", default=_MISSING)
    input_values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=_MISSING)


class Event(msgspec.Struct, gc=False):
    """An entry of ``traceEvents``; ``ts`` and ``dur`` are microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str | int | None = None
    ts: float = 0.0
    dur: float = 0.0
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
