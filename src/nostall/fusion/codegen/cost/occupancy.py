"""Occupancy of an H200: how many blocks of a kernel are resident on an SM at once."""

from __future__ import annotations

from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE
from nostall.fusion.hardware import H200

# The vendor's figures for compute capability 9.0
MAX_BLOCKS_PER_SM = 32
RESERVED_SHARED_BYTES = 1024
"""Shared memory that the system reserves in every block."""
SHARED_BYTES_PER_SM = H200.shared_bytes + RESERVED_SHARED_BYTES
"""A single block can have all of it but its own reserved part."""
REGISTER_GRANULARITY = 8
"""Registers of a thread are allocated in multiples of this."""


def blocks_per_sm(warps: int, registers_per_thread: int, shared_bytes: int) -> int:
    """Resident blocks of so many warps, registers and shared bytes; 0 if not even one fits."""
    allocated = -(-registers_per_thread // REGISTER_GRANULARITY) * REGISTER_GRANULARITY
    return min(
        MAX_BLOCKS_PER_SM,
        H200.max_warps // warps,
        H200.registers // (WARP_SIZE * warps * allocated),
        SHARED_BYTES_PER_SM // (shared_bytes + RESERVED_SHARED_BYTES),
    )
