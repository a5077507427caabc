"""Work on several GPUs of one or more machines, distributed with Dask.

A worker runs a whole search, not single candidates: proposing takes a good part of a search's time
(docs/explanation/measuring.md has the figures), so one process that proposes for several GPUs would
keep them waiting.
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
