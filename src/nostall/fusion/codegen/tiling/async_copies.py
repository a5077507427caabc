"""Software pipelining of loops: asynchronous copies (``cp.async``) load later iterations.

Triton's pipeliner does this for loops with a number of stages.  It pays off for programs that loop
over rows if few of them are resident, because they keep sums in registers.
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
"""Iterations in flight: two are being copied while one is computed.

Measured on an H200 with three norm backward passes: two stages were slower than no pipelining, and
four were hardly ever faster than three.
"""


def loop_operands(schedule: Schedule) -> tuple[Operand, ...]:
    """The operands of which every iteration reads a new tile: those along rows and columns."""
    rows, columns = set(schedule.rows), set(schedule.columns)
    row_operands = (
        operand
        for operand in schedule.mapping.memory_operands
        if loops_used(operand.accesses) & rows
    )
    return tuple(operand for operand in row_operands if loops_used(operand.accesses) & columns)


def async_copy_bytes(schedule: Schedule, lanes: int) -> int:
    """Bytes of shared memory for the copies in flight, for tiles of ``lanes`` elements."""
    graph = schedule.mapping.graph
    lane_bytes = sum(
        DTYPE_BYTES[graph[operand.source].dtype] for operand in loop_operands(schedule)
    )
    return (NUM_STAGES - 1) * lanes * lane_bytes


def pipelined_load_waits(iterations: int) -> float:
    """Load latencies that a pipelined loop is exposed to after the first one, as modelled.

    All copies in flight share one latency.
    """
    return max(0.0, iterations / (NUM_STAGES - 1) - 1)


def loop_range(first: str, last: str, step: int, async_copies: bool) -> str:
    """The iterator expression of a loop in a kernel, pipelined with ``async_copies``."""
    bounds = f"{first}, {last}, {step}"
    return f"tl.range({bounds}, num_stages={NUM_STAGES})" if async_copies else f"range({bounds})"


def illegal_async_copy_reason(
    schedule: Schedule, lanes: int, is_peeled: bool = False
) -> str | None:
    """Why no operand of a loop can be copied asynchronously; None if one can.

    In peeled loops every full iteration begins at a multiple of 16 bytes, so operands can be
    copied.
    """
    can_copy = _can_copy_column_major if schedule.is_column_major else can_copy_async
    if not (is_peeled or any(can_copy(schedule, operand) for operand in loop_operands(schedule))):
        return "the hardware copies 4 bytes at least; no operand's rows are multiples of that"
    if (needed := async_copy_bytes(schedule, lanes)) > MAX_SHARED_BYTES:
        return f"{needed} bytes of shared memory; at most {MAX_SHARED_BYTES}"
    return None


def _can_copy_column_major(schedule: Schedule, operand: Operand) -> bool:
    """As :func:`~nostall.fusion.codegen.tiling.on_chip.can_copy_async`, but for column-major
    schedules: the elements of a column are contiguous."""
    node, sizes = schedule.mapping.graph[operand.source], schedule.mapping.loop_sizes
    offset = tensor_offset(operand.accesses, node.strides, sizes)
    fastest = schedule.rows[-1]
    strides = [stride for loop, stride in offset.strides.items() if loop != fastest]
    alignment = math.gcd(sizes[fastest], offset.start, *strides) * DTYPE_BYTES[node.dtype]
    return offset.strides.get(fastest) == 1 and alignment % MIN_ASYNC_COPY_BYTES == 0
