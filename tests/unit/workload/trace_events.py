"""Builders for small traces in the format of Kineto; times are microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def kernel(name: str, start: float, duration: float, **args: Any) -> Event:
    """A kernel on stream 7 of device 0; ``launch=`` sets its correlation id."""
    defaults = {"stream": 7, "device": 0, "correlation": args.pop("launch", -1)}
    return event("kernel", name, start, duration, **{**defaults, **args})


def event(category: str, name: str, start: float, duration: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start,
        "dur": duration,
        "args": args,
    }


def launch(start: float, correlation: int, duration: float = 2.0) -> Event:
    return event("cuda_runtime", "cudaLaunchKernel", start, duration, correlation=correlation)


def trace(*events: Event, rank: int | None = 0, world: int = 1, **fields: Any) -> dict[str, Any]:
    """A trace with these events; ``fields`` are added to the trace object."""
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world}}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Test GPU"}],
        **info,
        "traceEvents": list(events),
        "traceName": "x.json",
        **fields,
    }


def write(path: Path, value: object, indent: int | None = 2) -> Path:
    """Write ``value`` as JSON (bytes as they are), gzipped if the path ends with ``.gz``."""
    data = value if isinstance(value, bytes) else json.dumps(value, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
