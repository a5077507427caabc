"""Work on several GPUs of one or more machines, distributed with Dask.

A worker runs a whole search, not single candidates: a small kernel is timed faster than a process
proposes the candidates for several GPUs (docs/explanation/measuring.md).
"""

from nostall.farm.farm import (
    DeviceSpec,
    Farm,
    FarmDevice,
    WorkerPool,
    close_device,
    is_wanted,
    local,
    open_device,
    remote,
)

__all__ = [
    "DeviceSpec",
    "Farm",
    "FarmDevice",
    "WorkerPool",
    "close_device",
    "is_wanted",
    "local",
    "open_device",
    "remote",
]
