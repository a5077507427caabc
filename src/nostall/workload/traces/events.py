"""What of a Kineto event is decoded: the fields that the analysis uses, everything else skipped."""

from __future__ import annotations

import msgspec

_NO_TEXT = msgspec.Raw()


class Arguments(msgspec.Struct, gc=False):
    """``args`` of a GPU event, a runtime call or an operator."""

    stream: int | str | None = None
    device: int | str | None = None
    correlation: int | None = None
    external: int | None = msgspec.field(name="External id", default=None)
    bytes: float | None = None
    collective: str | None = msgspec.field(name="Collective name", default=None)
    elements: float | None = msgspec.field(name="In msg nelems", default=None)
    dtype: str | None = None
    dims: msgspec.Raw = msgspec.field(name="Input Dims", default=_NO_TEXT)
    types: msgspec.Raw = msgspec.field(name="Input type", default=_NO_TEXT)
    plain: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=_NO_TEXT)


class Event(msgspec.Struct, gc=False):
    """One entry of ``traceEvents``; times in microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str | int | None = None
    ts: float = 0.0
    dur: float = 0.0
    tid: int | str | None = None
    args: Arguments | None = None


class Distributed(msgspec.Struct):
    """``distributedInfo`` of a trace."""

    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None


class Device(msgspec.Struct):
    """An entry of ``deviceProperties``."""

    id: int | None = None
    name: str | None = None


class Frame(msgspec.Struct):
    """What stands around the events."""

    schema: int | None = msgspec.field(name="schemaVersion", default=None)
    distributed: Distributed | None = msgspec.field(name="distributedInfo", default=None)
    devices: list[Device] = msgspec.field(name="deviceProperties", default_factory=list)
