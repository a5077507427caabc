"""GPU parameters for the fusion evaluators; times that follow from them are modelled."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Parameters of one GPU."""

    name: str
    sms: int
    """Streaming multiprocessors."""
    clock_hz: float
    copy_bytes_per_second: float
    """Bandwidth of a large copy, bytes read plus bytes written."""
    launch_s: float
    """Seconds from the end of a kernel to the start of the next, in a CUDA graph."""
    ramp_s: float
    """Seconds at a kernel's start and end in which few loads and stores are in flight."""
    latency_s: float
    """Seconds from a load to its data."""
    l2_bytes: float
    """Bytes of L2 cache that a kernel can use for its own data."""
    max_warps: int = 64
    """Resident warps of an SM, at most."""
    registers: int = 65536
    """Registers (32 bits) of an SM."""
    max_registers: int = 255
    """Registers of a thread, at most."""
    shared_bytes: int = 227 * 1024
    """Shared memory of a block, at most."""
    schedulers: int = 4
    """Warp schedulers of an SM."""
    bytes_in_flight: int = 1024
    """Bytes that one warp has in flight; assumed: two loads of 16 bytes a lane."""


H200 = Hardware(
    name="H200",
    sms=132,  # vendor
    clock_hz=1.98e9,  # vendor, boost
    copy_bytes_per_second=4.3e12,  # measured on an H200
    launch_s=1.3e-6,  # on an H100 (Hazy Research, "No Bubbles")
    ramp_s=1.2e-6,  # assumed: the latencies of a kernel's first loads and last stores
    latency_s=0.35e-6,  # 683 cycles on an H100, public micro-benchmarks
    l2_bytes=37e6,  # assumed: three quarters of 50 MB
)
"""The GPU on which nostall's own measurements were made."""


def hardware_of(device: Any) -> Hardware:
    """Parameters of the GPU that a ``torch.device`` names: the H200's, with its own number of SMs.

    Those of the H200 for other devices, and in a process without a GPU.
    """
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return H200
    properties = torch.cuda.get_device_properties(device)
    return replace(H200, name=properties.name, sms=properties.multi_processor_count)
