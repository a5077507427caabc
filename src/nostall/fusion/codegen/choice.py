"""Which plan to try first: a modelled time for each, before anything was measured.

It orders plans, no more; what is chosen for good is up to measurement.  What kernels ask for and
how long that takes is said in ``demand`` and ``sm``; small dots and rows in shared memory have
rougher models here: bytes at the copy bandwidth, less while there are too few threads to fill the
machine, and what is done on chip.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from nostall.core.errors import BadInput
from nostall.fusion.codegen.demand import demands
from nostall.fusion.codegen.kept import Kept, demotions, varying
from nostall.fusion.codegen.levels import Value
from nostall.fusion.codegen.mapping import Operand
from nostall.fusion.codegen.occupancy import resident_blocks
from nostall.fusion.codegen.plan import (
    MOST_SHARE,
    WARP,
    KernelPlan,
    Scheme,
    most_registers,
    plans,
    registers,
)
from nostall.fusion.codegen.schedule import Schedule
from nostall.fusion.codegen.sm import H200, seconds

# By Little's law some 40 KB have to be in flight on each SM: 512 threads with 16 bytes, and as much
# again to cover what they do in between.
BYTES_TO_FILL_SM = 40e3
THREADS_TO_FILL_SM = 1024
BYTES_AT_ONCE = 16
# That L2 is 2.5 times as fast is XLA's constant (gpu_performance_model_base.h).
L2_SPEED_UP = 2.5
# Vendor's 67e12 fp32 operations a second, two for each product; what tensor cores give matrices of
# a few tiles, of 989e12, is assumed.
FMA_PER_S = 33.5e12
TENSOR_CORES = 4
# Vendor: 32 banks of 4 bytes and 128 lanes on each SM.  A heavy operator is taken as 8
# instructions for each element (exp: 4, division: 9, evaluate.work).
SHARED_BYTES_PER_S = H200.sms * 128 * H200.clock_hz
LANES_PER_S = H200.sms * 128 * H200.clock_hz
HEAVY = 8
# Four warps on each of an SM's schedulers cover the latencies of what is on chip, assumed.
WARPS_TO_FILL_SM = 16


def first_choice(of: Schedule, also: Collection[Scheme] = ()) -> KernelPlan:
    """The plan with the least modelled time, of :func:`~nostall.fusion.codegen.plan.plans` with
    these unproven schemes.  Raises :class:`BadInput` where none is legal."""
    found = plans(of, also)
    if not found.legal:
        reasons = "; ".join(f"{r.plan}: {r.reason}" for r in found.refused[:3])
        raise BadInput(
            f"none of {len(found.refused)} plans fits ({reasons}); make smaller kernels of these "
            "operators"
        )
    return min(found.legal, key=lambda plan: rank(of, plan))


def rank(of: Schedule, plan: KernelPlan) -> tuple[float, int, str]:
    """What orders plans: the modelled time, then the fewest rows, which share less."""
    return modelled_seconds(of, plan), plan.rows, str(plan)


def modelled_seconds(of: Schedule, plan: KernelPlan) -> float:
    """Seconds that the kernels of a plan would take on an H200, *modelled*."""
    if plan.scheme == "matrix":
        moved = sum(of.mapping.graph[i].bytes for i in (*of.mapping.inputs, *of.mapping.outputs))
        return _matrix_seconds(of, plan, float(moved))
    if plan.scheme == "shared":
        return _shared_seconds(of, plan)
    return sum(seconds(demand) for demand in demands(of, plan))


def _matrix_seconds(of: Schedule, plan: KernelPlan, moved: float) -> float:
    """As :func:`modelled_seconds`, of small dots: bytes, or products where those take longer."""
    graph = of.mapping.graph
    lanes = of.row_count * plan.num_warps * WARP
    busy = min(1.0, lanes / (H200.sms * THREADS_TO_FILL_SM), of.row_count / H200.sms)
    busy *= min(1.0, max(0.25, plan.elements_per_thread * 2 / BYTES_AT_ONCE))
    products = 0.0
    for index in of.mapping.operators:
        if graph[index].kind == "dot":
            sizes = [of.mapping.sizes[loop] for loop in of.mapping.reduced[index]]
            rate = FMA_PER_S * (1 if graph[index].dtype == "float32" else TENSOR_CORES)
            products += graph[index].elements * math.prod(sizes) / rate
    crowding = max(1.0, registers(of, plan, MOST_SHARE) / most_registers(plan))
    return max(moved / H200.copy_bytes_per_s / busy, products / busy) * crowding + H200.launch_s


def _shared_seconds(of: Schedule, plan: KernelPlan) -> float:
    """As :func:`modelled_seconds`, of rows in shared memory: bytes are read once where they are
    kept, again from L2 or memory where they are not.

    A block that is alone on its SM does not load while it works on chip; of several, the others do.
    That is what makes it worth keeping less.
    """
    graph, kept = of.mapping.graph, demotions(of, plan.ahead)[plan.demoted]
    shared = kept.arena(plan.chunks[0]).bytes
    alive = resident_blocks(of, plan, shared)
    moved = sum(graph[i].bytes for i in {*of.mapping.inputs, *of.mapping.outputs})
    by_row = varying(of, of.rows) if of.rows else frozenset()
    again = sum(graph[o.source].bytes for o in _read_again(kept) if o in by_row)
    held = again / of.row_count * min(of.row_count, H200.sms * alive)
    reads = again / (L2_SPEED_UP if held < H200.l2_bytes else 1)
    running = min(alive, of.row_count / H200.sms)
    busy = min(1.0, running * plan.num_warps * WARP / THREADS_TO_FILL_SM)
    if plan.ahead:
        early = sum(b.element for b in kept.buffers if b.early) * of.column_count
        busy = min(1.0, running * early / BYTES_TO_FILL_SM)
    memory = (moved + reads) / H200.copy_bytes_per_s / busy
    chip = _chip_seconds(kept) / min(1.0, running, running * plan.num_warps / WARPS_TO_FILL_SM)
    waiting = min(memory, chip) / max(1.0, running)
    return max(memory, chip) + waiting + H200.launch_s


def _read_again(kept: Kept) -> list[Operand]:
    """Places in memory that passes read after an earlier one did, once for each time."""
    found: list[Operand] = []
    seen: set[Value] = set()
    for part in kept.passes:
        reads = [v for v in part.taken if not isinstance(v, int) and v not in part.there]
        found += [operand for operand in reads if operand in seen]
        seen.update(reads)
    return found


def _chip_seconds(kept: Kept) -> float:
    """Shared memory and arithmetic of all rows, with all SMs at it."""
    of, graph = kept.of, kept.of.mapping.graph
    elements = of.row_count * of.column_count
    touched = sum(
        buffer.element * len(numbers)
        for buffer, numbers in zip(kept.buffers, kept.needed.values(), strict=True)
    )
    work = sum(
        HEAVY if graph[i].kind == "heavy" else 1
        for part in kept.passes
        for i in (*part.wide, *part.reductions)
    )
    return elements * (touched / SHARED_BYTES_PER_S + work / LANES_PER_S)
