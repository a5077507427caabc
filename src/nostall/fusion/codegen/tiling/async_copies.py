"""What a loop reads, copied to shared memory some turns before it is worked on (``cp.async``).

Triton's software pipeliner does it in loops that say how many turns are under way at once.  It pays
where programs walk over rows and few are resident, because they keep sums in registers.
"""

from __future__ import annotations

import math

from nostall.fusion.codegen.loops.addresses import offset
from nostall.fusion.codegen.loops.mapping import Operand, used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.on_chip import COPIED_BYTES, MOST_BYTES, copied
from nostall.fusion.graph.operations import DTYPE_BYTES

STAGES = 3
"""Turns under way at once: two are copied, one is worked on.  Tried by hand on three norm backward
passes on an H200: two stages were slower than none, four hardly ever faster than three."""


def operands(of: Schedule) -> tuple[Operand, ...]:
    """What every turn reads element by element."""
    rows, columns = set(of.rows), set(of.columns)
    reads = (operand for operand in of.mapping.reads if used(operand.places) & rows)
    return tuple(operand for operand in reads if used(operand.places) & columns)


def bytes_ahead(of: Schedule, lanes: int) -> int:
    """Shared memory for tiles of so many lanes."""
    graph = of.mapping.graph
    each = sum(DTYPE_BYTES[graph[operand.source].dtype] for operand in operands(of))
    return (STAGES - 1) * lanes * each


def behind(turns: int) -> float:
    """Loads that wait for others in a loop of so many turns, copied ahead, after the first one."""
    return max(0.0, turns / (STAGES - 1) - 1)


def turns(first: str, last: str, step: int, ahead: bool) -> str:
    """What a loop counts through; ``ahead``: with copies of the turns that come."""
    told = f"{first}, {last}, {step}"
    return f"tl.range({told}, num_stages={STAGES})" if ahead else f"range({told})"


def refused(of: Schedule, lanes: int, is_peeled: bool = False) -> str | None:
    """Why nothing can be copied ahead; None where something can.  Where rows are peeled whole turns
    begin at multiples of 16 bytes."""
    lies = _copied_along_rows if of.along_rows else copied
    if not (is_peeled or any(lies(of, operand) for operand in operands(of))):
        return "the hardware copies 4 bytes at least; no operand's rows are multiples of that"
    if (needed := bytes_ahead(of, lanes)) > MOST_BYTES:
        return f"{needed} bytes of shared memory; at most {MOST_BYTES}"
    return None


def _copied_along_rows(of: Schedule, operand: Operand) -> bool:
    """As :func:`~nostall.fusion.codegen.tiling.on_chip.copied`, where neighbours are those of one column."""
    node, sizes = of.mapping.graph[operand.source], of.mapping.sizes
    where = offset(operand.places, node.strides, sizes)
    steps = [weight for loop, weight in where.weights.items() if loop != of.rows[-1]]
    alike = math.gcd(sizes[of.rows[-1]], where.start, *steps) * DTYPE_BYTES[node.dtype]
    return where.weights.get(of.rows[-1]) == 1 and alike % COPIED_BYTES == 0
