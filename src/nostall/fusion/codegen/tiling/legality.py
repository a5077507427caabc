"""Which plans are legal for a schedule, and why others are not.

``CONSTRAINTS`` has one entry for each scheme; :func:`illegal_reason` adds the limits that all
schemes share: tile size, threads without work, and registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from nostall.fusion.codegen.loops.dot_axes import find_groups
from nostall.fusion.codegen.loops.dynamic_rows import has_dynamic_columns, needs_size_arguments
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import illegal_async_copy_reason
from nostall.fusion.codegen.tiling.kernel_plan import REGISTER_SCHEMES, KernelPlan, Scheme
from nostall.fusion.codegen.tiling.loop_peeling import find_peeling
from nostall.fusion.codegen.tiling.on_chip import illegal_on_chip_reason
from nostall.fusion.codegen.tiling.sequence_tiles import MIN_TILE_POSITIONS, find_sequence_tiling
from nostall.fusion.codegen.tiling.tile_sizes import (
    WARP_SIZE,
    group_lanes,
    max_matrix_lanes,
    next_power_of_two,
    positions_per_tile,
)
from nostall.fusion.hardware import H200

REGISTERS_PER_SM = H200.registers
MAX_REGISTERS_PER_THREAD = H200.max_registers
BASE_REGISTERS = 24
"""Registers of a thread for addresses, row values and other things besides the tile's values."""
MIN_LIVE_SHARE, MAX_LIVE_SHARE = 0.25, 0.8
"""Registers for each live value and element of a thread: range over a dozen chains compiled for
sm_90. Below 1 because fp16 values stay packed and the compiler reorders element by element."""
MAX_TILE_ELEMENTS = 1 << 17
"""Triton allows 2^20 elements of a tensor; tiles far below that already spill."""
MAX_UNROLLED_PRODUCTS = 1536
"""fp32 products of one thread, which Triton unrolls. The backward pass of attention with 64
positions of 64 has 5120: compiled for sm_90 it has 350 KB of code, spills and takes 19 s."""
MAX_SEQUENCE_ELEMENTS = 32
"""Elements of a thread in one tile of a sequence; few, so that many programs are resident."""
EVICT_FIRST_BYTES = H200.l2_bytes
"""Outputs larger than this (bytes) do not fit in L2: the next kernel finds their start evicted."""

SIZED_SCHEMES: tuple[Scheme, ...] = ("thread", "warp", "block", "looped")
"""Schemes whose kernels can have dynamic sizes as arguments."""

Constraint = Callable[[Schedule, KernelPlan], str | None]
"""The reason why a plan of one scheme is illegal; None if it is legal."""


def illegal_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    """Why a plan is illegal for a schedule; None if it is legal."""
    return (
        _tile_reason(schedule, plan)
        or _option_reason(schedule, plan)
        or _dynamic_reason(schedule, plan)
        or CONSTRAINTS[plan.scheme](schedule, plan)
        or _register_reason(schedule, plan)
    )


def large_outputs(schedule: Schedule) -> frozenset[int]:
    """The outputs that are larger than :data:`EVICT_FIRST_BYTES`."""
    graph, outputs = schedule.mapping.graph, schedule.mapping.outputs
    return frozenset(index for index in outputs if graph[index].bytes > EVICT_FIRST_BYTES)


def max_registers(num_warps: int) -> int:
    """Registers that a thread can have in a program of ``num_warps`` warps."""
    return min(MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM // (WARP_SIZE * num_warps))


def modelled_registers(schedule: Schedule, plan: KernelPlan, share: float) -> int:
    """Registers that a thread needs, *modelled*.

    ``share``: registers for each live value and element, between :data:`MIN_LIVE_SHARE` and
    :data:`MAX_LIVE_SHARE`; only the compiler can tell.
    """
    elements = max(1.0, plan.elements_per_thread)
    return math.ceil(schedule.peak_live_values * elements * share) + BASE_REGISTERS


# -- limits of all schemes -------------------------------------------------------------------------


def _tile_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    threads, elements = WARP_SIZE * plan.num_warps, plan.rows * sum(plan.chunks)
    if elements > MAX_TILE_ELEMENTS:
        return f"a tile of {elements} elements; at most {MAX_TILE_ELEMENTS}"
    if plan.rows > next_power_of_two(schedule.row_count):
        return f"{plan.rows} rows in a program; there are {schedule.row_count}"
    if plan.rows * min(plan.chunks) < threads and plan.num_warps > 1:
        return f"{threads} threads would repeat the work of {plan.rows * min(plan.chunks)}"
    if cut := [width for width in plan.chunks if width % schedule.block_columns]:
        return f"{cut[0]} columns at once cut blocks of {schedule.block_columns}"
    return None


def _option_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    """Options that several schemes have: ``peeled``, ``eager_loads`` and ``evict_first``."""
    in_registers = plan.scheme in REGISTER_SCHEMES
    if plan.peeled and (plan.rows > 1 or not find_peeling(schedule)):
        return "peeled are single rows, one for each program, that begin at odd places"
    if plan.peeled and schedule.block_reductions:
        return "lanes of peeled rows would cut the blocks of columns that are reduced"
    if plan.eager_loads and not in_registers:
        return "what is not held in registers cannot all be read before anything is computed"
    if plan.evict_first and not (in_registers and large_outputs(schedule)):
        megabytes = f"{EVICT_FIRST_BYTES / 1e6:.0f} MB"
        return f"only outputs of more than {megabytes}, from registers, are streamed"
    return None


def _dynamic_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    """What kernels with dynamic sizes as arguments lack."""
    if not needs_size_arguments(schedule):
        return None
    if plan.scheme not in SIZED_SCHEMES or plan.async_copies or plan.peeled or plan.evict_first:
        return f"kernels with dynamic sizes have only the schemes {', '.join(SIZED_SCHEMES)}"
    if has_dynamic_columns(schedule) and plan.scheme != "looped":
        return "a row of dynamic length is read in a loop"
    return None


def _register_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    needed = modelled_registers(schedule, plan, MIN_LIVE_SHARE)
    available, threads = max_registers(plan.num_warps), WARP_SIZE * plan.num_warps
    if needed <= available:
        return None
    return (
        f"at least {needed} registers for each thread (modelled); {available} at {threads} threads"
    )


# -- limits of single schemes ----------------------------------------------------------------------


def _no_constraint(schedule: Schedule, plan: KernelPlan) -> str | None:
    return None


def _loop_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    if not plan.async_copies:
        return None
    return illegal_async_copy_reason(schedule, plan.rows * sum(plan.chunks), plan.peeled)


def _shared_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    return illegal_on_chip_reason(
        schedule, plan.rematerialized, plan.chunks[0], plan.async_copies, plan.peeled
    )


def _matrix_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    products = _unrolled_products(schedule, plan)
    if products <= MAX_UNROLLED_PRODUCTS:
        return None
    return f"{products} products in fp32 for each thread; at most {MAX_UNROLLED_PRODUCTS}"


def _unrolled_products(schedule: Schedule, plan: KernelPlan) -> int:
    """fp32 products of one thread."""
    lanes, mapping, products = group_lanes(schedule), schedule.mapping, 0
    for index in mapping.operators:
        node = mapping.graph[index]
        if node.kind == "dot" and node.dtype == "float32":
            loops = mapping.loops[index] | mapping.reduced_loops[index]
            products += math.prod(lanes[at] for at in find_groups(loops, schedule.loop_groups))
    return products // (WARP_SIZE * plan.num_warps)


def _sequence_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    tiling = find_sequence_tiling(schedule)
    if isinstance(tiling, str):
        return tiling
    length = schedule.count(schedule.loop_groups[tiling.group])
    positions, least = (
        positions_per_tile(schedule, tiling.group, plan.chunks[0]),
        MIN_TILE_POSITIONS,
    )
    if positions < least or positions != next_power_of_two(positions) or positions >= length:
        return f"{positions} places at once of {length}; powers of two from {least} on, and fewer"
    if (elements := plan.elements_per_thread) > MAX_SEQUENCE_ELEMENTS:
        return f"{elements:.0f} elements for each thread; at most {MAX_SEQUENCE_ELEMENTS}"
    if max_matrix_lanes(schedule, tiling.group) > plan.chunks[0]:
        return "what has no places is larger than a turn"
    return None


CONSTRAINTS: Mapping[Scheme, Constraint] = {
    "thread": _no_constraint,
    "warp": _no_constraint,
    "block": _no_constraint,
    "looped": _loop_reason,
    "shared": _shared_reason,
    "split": _loop_reason,
    "column": _loop_reason,
    "matrix": _matrix_reason,
    "turned": _sequence_reason,
}
"""Conditions for plans of each scheme, besides the limits of all schemes."""
