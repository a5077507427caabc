"""What the evaluators assume of a GPU.  Times that follow from these are *modelled*."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU.  Bytes, seconds, cycles; warps and registers are those of one SM."""

    name: str
    sms: int
    clock_hz: float
    copy_bytes_per_second: float
    launch_s: float
    ramp_s: float
    latency_s: float
    l2_bytes: float
    max_warps: int = 64
    registers: int = 65536
    most_registers: int = 255
    shared_bytes: int = 227 * 1024
    schedulers: int = 4
    bytes_in_flight: int = 1024


H200 = Hardware(
    name="H200",
    sms=132,  # vendor
    clock_hz=1.98e9,  # vendor, boost
    # A large copy, read and write together; measured on an H200.
    copy_bytes_per_second=4.3e12,
    # One kernel of a CUDA graph to the next on an H100 (Hazy Research, "No Bubbles").
    launch_s=1.3e-6,
    # Assumed: a kernel's first loads and last stores with nothing to overlap, about two latencies.
    ramp_s=1.2e-6,
    latency_s=0.35e-6,  # 683 cycles on an H100, public micro-benchmarks
    l2_bytes=37e6,  # of 50 MB what is left for a kernel's own data is taken as three quarters
)
"""The GPU that nostall's own measurements are from.  ``bytes_in_flight`` (assumed: two loads of 16
bytes a lane and warp) decides how many warps it takes to fill the memory's latency."""
