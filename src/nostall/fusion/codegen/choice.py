"""Which plan to try first: a modelled time for each, before anything was measured.

It orders plans, no more; what is chosen for good is up to measurement.  What kernels ask for and
how long that takes is said in ``demand`` and ``sm``; small dots have a rougher model here: bytes at
the copy bandwidth, less while there are too few threads to fill the machine, or products.
"""

from __future__ import annotations

import math

from nostall.core.errors import BadInput
from nostall.fusion.codegen.demand import demands
from nostall.fusion.codegen.plan import (
    MOST_SHARE,
    WARP,
    KernelPlan,
    most_registers,
    plans,
    registers,
)
from nostall.fusion.codegen.schedule import Schedule
from nostall.fusion.codegen.sm import H200, seconds

# By Little's law some 40 KB have to be in flight on each SM: 512 threads with 16 bytes, and as much
# again to cover what they do in between.
THREADS_TO_FILL_SM = 1024
BYTES_AT_ONCE = 16
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
    return min(found.legal, key=lambda plan: rank(of, plan))


def rank(of: Schedule, plan: KernelPlan) -> tuple[float, int, str]:
    """What orders plans: the modelled time, then the fewest rows, which share less."""
    return modelled_seconds(of, plan), plan.rows, str(plan)


def modelled_seconds(of: Schedule, plan: KernelPlan) -> float:
    """Seconds that the kernels of a plan would take on an H200, *modelled*."""
    if plan.scheme == "matrix":
        moved = sum(of.mapping.graph[i].bytes for i in (*of.mapping.inputs, *of.mapping.outputs))
        return _matrix_seconds(of, plan, float(moved))
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
