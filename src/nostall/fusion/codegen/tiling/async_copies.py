"""What a loop reads, copied to shared memory some turns before it is worked on (``cp.async``).

Triton's software pipeliner does it in loops that say how many turns are under way at once.  It pays
where programs walk over rows and few are resident, because they keep sums in registers.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.loops.addresses import tensor_offset
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.on_chip import (
    MAX_SHARED_BYTES,
    MIN_ASYNC_COPY_BYTES,
    can_copy_async,
)
from nostall.fusion.graph.operations import DTYPE_BYTES

NUM_STAGES = 3
"""Turns under way at once: two are copied, one is worked on.  Tried by hand on three norm backward
passes on an H200: two stages were slower than none, four hardly ever faster than three."""


def loop_operands(schedule: Schedule) -> tuple[Operand, ...]:
    """What every turn reads element by element."""
    rows, columns = set(schedule.rows), set(schedule.columns)
    reads = (
        operand
        for operand in schedule.mapping.memory_operands
        if loops_used(operand.accesses) & rows
    )
    return tuple(operand for operand in reads if loops_used(operand.accesses) & columns)


def async_copy_bytes(schedule: Schedule, lanes: int) -> int:
    """Shared memory for tiles of so many lanes."""
    graph = schedule.mapping.graph
    each = sum(DTYPE_BYTES[graph[operand.source].dtype] for operand in loop_operands(schedule))
    return (NUM_STAGES - 1) * lanes * each


def pipelined_load_waits(turns: int) -> float:
    """Loads that wait for others in a loop of so many turns, copied ahead, after the first one."""
    return max(0.0, turns / (NUM_STAGES - 1) - 1)


def loop_range(first: str, last: str, step: int, ahead: bool) -> str:
    """What a loop counts through; ``ahead``: with copies of the turns that come."""
    told = f"{first}, {last}, {step}"
    return f"tl.range({told}, num_stages={NUM_STAGES})" if ahead else f"range({told})"


def illegal_async_copy_reason(
    schedule: Schedule, lanes: int, is_peeled: bool = False
) -> str | None:
    """Why nothing can be copied ahead; None where something can.  Where rows are peeled whole turns
    begin at multiples of 16 bytes."""
    lies = _can_copy_column_major if schedule.is_column_major else can_copy_async
    if not (is_peeled or any(lies(schedule, operand) for operand in loop_operands(schedule))):
        return "the hardware copies 4 bytes at least; no operand's rows are multiples of that"
    if (needed := async_copy_bytes(schedule, lanes)) > MAX_SHARED_BYTES:
        return f"{needed} bytes of shared memory; at most {MAX_SHARED_BYTES}"
    return None


def _can_copy_column_major(schedule: Schedule, operand: Operand) -> bool:
    """As :func:`~nostall.fusion.codegen.tiling.on_chip.can_copy_async`, where neighbours are those of one column."""
    node, sizes = schedule.mapping.graph[operand.source], schedule.mapping.loop_sizes
    where = tensor_offset(operand.accesses, node.strides, sizes)
    steps = [weight for loop, weight in where.strides.items() if loop != schedule.rows[-1]]
    alike = math.gcd(sizes[schedule.rows[-1]], where.start, *steps) * DTYPE_BYTES[node.dtype]
    return where.strides.get(schedule.rows[-1]) == 1 and alike % MIN_ASYNC_COPY_BYTES == 0
