"""Which plan to try first: a rough modelled time for each, before anything was measured.

It orders plans, no more.  Bytes at the copy bandwidth, less while there are too few threads to
fill the machine, plus the launches.  What is chosen for good is up to measurement.
"""

from __future__ import annotations

import math

from nostall.core.errors import BadInput
from nostall.fusion.codegen.passes import passes
from nostall.fusion.codegen.plan import (
    MOST_SHARE,
    WARP,
    KernelPlan,
    idle_share,
    most_registers,
    plans,
    registers,
)
from nostall.fusion.codegen.schedule import Schedule

# H200: 132 SMs; copy bandwidth as measured for issue 5 of this project; the launch cost under CUDA
# graphs is Hazy Research's figure for H100 ("No Bubbles", 2025).
SMS = 132
COPY_BYTES_PER_S = 4.3e12
LAUNCH_S = 1.3e-6
# By Little's law some 40 KB have to be in flight on each SM: 512 threads with 16 bytes, and as much
# again to cover what they do in between.
THREADS_TO_FILL_SM = 1024
BYTES_AT_ONCE = 16
SECTOR_BYTES = 32
THREADS_SM = 2048
# Of 50 MB of an H100 or H200, what is left for a kernel's own data is taken as three quarters; that
# L2 is 2.5 times as fast is XLA's constant (gpu_performance_model_base.h).
L2_BYTES = 37e6
L2_SPEED_UP = 2.5
# Vendor's 67e12 fp32 operations a second, two for each product; what tensor cores give matrices of
# a few tiles, of 989e12, is assumed.
FMA_PER_S = 33.5e12
TENSOR_CORES = 4


def first_choice(of: Schedule) -> KernelPlan:
    """The plan with the least modelled time.  Raises :class:`BadInput` where none is legal."""
    found = plans(of)
    if not found.legal:
        reasons = "; ".join(f"{r.plan}: {r.reason}" for r in found.refused[:3])
        raise BadInput(
            f"none of {len(found.refused)} plans fits ({reasons}); make smaller kernels of these "
            "operators"
        )
    return min(found.legal, key=lambda plan: (modelled_seconds(of, plan), str(plan)))


def modelled_seconds(of: Schedule, plan: KernelPlan) -> float:
    """Seconds that the kernels of a plan would take on an H200, *modelled*."""
    blocks = -(-of.row_count // plan.rows)
    reads = float(sum(of.mapping.graph[i].bytes for i in of.mapping.inputs))
    writes = float(sum(of.mapping.graph[i].bytes for i in of.mapping.outputs))
    launches = 1
    if plan.scheme == "matrix":
        return _matrix_seconds(of, plan, reads + writes)
    if plan.scheme == "thread":
        blocks = -(-of.row_count // plan.chunks[0])
    elif plan.scheme in ("looped", "split"):
        walks = sum(part.has_columns for part in passes(of))
        blocks *= plan.parts
        # Rows that are being walked over at one time come from L2 when they are read again.
        resident = min(blocks, SMS * max(1, THREADS_SM // (WARP * plan.num_warps)))
        held = reads / blocks * resident
        reads *= 1 + (walks - 1) * (1 / L2_SPEED_UP if held < L2_BYTES else 1)
        launches = len(passes(of)) if plan.scheme == "split" else 1
    elif plan.scheme == "column":
        blocks = of.count(of.rows[: len(of.rows) - len(of.summed)]) * plan.parts
        launches = 2
    threads = blocks * plan.num_warps * WARP
    busy = min(1.0, threads / (SMS * THREADS_TO_FILL_SM), blocks / SMS)
    # Lanes that idle, and threads with less than a full memory access, keep fewer bytes in flight.
    columns = of.row_count if plan.scheme == "thread" else of.column_count
    whole = plan.scheme not in ("thread", "looped", "split")
    busy *= 1 - (idle_share(columns, plan.chunks) if whole else 0.0)
    widest = max((of.mapping.graph[i].bytes for i in of.mapping.inputs), default=0)
    per_element = max(1.0, widest / max(1, of.row_count * max(1, of.column_count)))
    busy *= min(1.0, max(0.25, plan.elements_per_thread * per_element / BYTES_AT_ONCE))
    # Memory gives 32 bytes at least; where rows lie along it, a tile reads as many as it has rows.
    along = plan.rows if of.columns and len(of.mapping.sizes) - 1 in of.rows else plan.chunks[0]
    busy *= min(1.0, along * per_element / SECTOR_BYTES)
    # More than a few accesses for each thread only cost registers.
    crowding = 1 + 0.02 * max(0.0, plan.elements_per_thread * per_element / BYTES_AT_ONCE - 2)
    # What may not fit into registers may be spilled.
    crowding *= max(1.0, registers(of, plan, MOST_SHARE) / most_registers(plan))
    return (reads + writes) / COPY_BYTES_PER_S / busy * crowding + launches * LAUNCH_S


def _matrix_seconds(of: Schedule, plan: KernelPlan, moved: float) -> float:
    """As :func:`modelled_seconds`, of small dots: bytes, or products where those take longer."""
    graph = of.mapping.graph
    lanes = of.row_count * plan.num_warps * WARP
    busy = min(1.0, lanes / (SMS * THREADS_TO_FILL_SM), of.row_count / SMS)
    busy *= min(1.0, max(0.25, plan.elements_per_thread * 2 / BYTES_AT_ONCE))
    products = 0.0
    for index in of.mapping.operators:
        if graph[index].kind == "dot":
            sizes = [of.mapping.sizes[loop] for loop in of.mapping.reduced[index]]
            rate = FMA_PER_S * (1 if graph[index].dtype == "float32" else TENSOR_CORES)
            products += graph[index].elements * math.prod(sizes) / rate
    crowding = max(1.0, registers(of, plan, MOST_SHARE) / most_registers(plan))
    return max(moved / COPY_BYTES_PER_S / busy, products / busy) * crowding + LAUNCH_S
