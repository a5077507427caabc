"""Work on several GPUs of one or more machines, distributed with Dask.

A worker runs a whole search, not single candidates: a small kernel is timed faster than a process
proposes the candidates for several GPUs (docs/explanation/measuring.md).
"""

from nostall.farm.device import DeviceSpec, FarmDevice, close_device, is_wanted, open_device
from nostall.farm.farm import Farm, WorkerPool, local, remote

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
