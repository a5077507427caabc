"""How many blocks of a kernel an SM of an H200 holds at once, from what each of them takes."""

from __future__ import annotations

from nostall.fusion.codegen.tiling.kernel_plan import WARP_SIZE
from nostall.fusion.hardware import H200

# Vendor's figures for compute capability 9.0.
MAX_BLOCKS_PER_SM = 32
RESERVED_SHARED_BYTES = 1024
"""Bytes that the system takes for every block."""
SHARED_BYTES_PER_SM = H200.shared_bytes + RESERVED_SHARED_BYTES
"""One block cannot have all of it: its own reserved part is off."""
REGISTER_GRANULARITY = 8
"""Registers of a thread come in multiples of this."""


def blocks_per_sm(warps: int, registers_thread: int, shared_bytes: int) -> int:
    """Blocks of so many warps, registers of each thread and bytes of shared memory; 0 where not
    even one fits."""
    granted = -(-registers_thread // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    return min(
        MAX_BLOCKS_PER_SM,
        H200.max_warps // warps,
        H200.registers // (WARP_SIZE * warps * granted),
        SHARED_BYTES_PER_SM // (shared_bytes + RESERVED_SHARED_BYTES),
    )
