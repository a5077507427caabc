"""Small traces, written as Kineto writes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def kernel(name: str, start: float, length: float, **args: Any) -> Event:
    """A kernel on stream 7 of device 0; ``launch=`` gives its correlation."""
    fixed = {"stream": 7, "device": 0, "correlation": args.pop("launch", -1)}
    return event("kernel", name, start, length, **{**fixed, **args})


def event(category: str, name: str, start: float, length: float, **args: Any) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start,
        "dur": length,
        "args": args,
    }


def launch(start: float, correlation: int, length: float = 2.0) -> Event:
    return event("cuda_runtime", "cudaLaunchKernel", start, length, correlation=correlation)


def trace(*events: Event, rank: int | None = 0, world: int = 1, **more: Any) -> dict[str, Any]:
    info = {} if rank is None else {"distributedInfo": {"rank": rank, "world_size": world}}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Test GPU"}],
        **info,
        "traceEvents": list(events),
        "traceName": "x.json",
        **more,
    }


def write(path: Path, value: object, indent: int | None = 2) -> Path:
    """Write JSON, gzipped where the name says so."""
    text = value if isinstance(value, bytes) else json.dumps(value, indent=indent).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path
