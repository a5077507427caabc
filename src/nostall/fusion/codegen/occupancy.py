"""How many blocks of a kernel an SM of an H200 holds at once, from what each of them takes."""

from __future__ import annotations

from nostall.fusion.codegen.plan import (
    MOST_SHARE,
    REGISTERS_SM,
    WARP,
    KernelPlan,
    most_registers,
    registers,
)
from nostall.fusion.codegen.schedule import Schedule

# Vendor's figures for compute capability 9.0.
THREADS_SM = 2048
BLOCKS_SM = 32
SHARED_SM = 228 * 1024
SHARED_RESERVED = 1024
"""Bytes that the system takes for every block."""


def blocks_per_sm(threads: int, registers_thread: int, shared_bytes: int) -> int:
    """Blocks of ``threads`` threads with so many registers each and so much shared memory; 0 where
    not even one fits."""
    return min(
        BLOCKS_SM,
        THREADS_SM // threads,
        REGISTERS_SM // (threads * registers_thread),
        SHARED_SM // (shared_bytes + SHARED_RESERVED),
    )


def resident_blocks(of: Schedule, plan: KernelPlan, shared_bytes: int) -> int:
    """Blocks of a plan that an SM holds, *modelled*: from the most registers that its values may
    need.  At least 1: a legal plan runs."""
    needed = min(registers(of, plan, MOST_SHARE), most_registers(plan))
    return max(1, blocks_per_sm(WARP * plan.num_warps, needed, shared_bytes))
