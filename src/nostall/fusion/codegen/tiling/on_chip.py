"""Values of a row that stay in shared memory between passes, and values that are recomputed.

Block composition (arXiv:2009.10924): a value that several passes over the columns need is kept on
chip.  If that takes too much shared memory, values are rematerialized instead, one after the other
(arXiv:1811.05213): cheap operators first, then expensive ones, then operands in memory, which are
read again.  Among equally expensive operators, the one nearest to the root is first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from nostall.fusion.codegen.expressions.templates import compute_dtype
from nostall.fusion.codegen.loops.addresses import offset_terms, tensor_offset
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.reduction_levels import Pass, ValueKey
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.loop_peeling import (
    VECTOR_BYTES,
    is_peeled_operand,
    lanes_per_row,
    widens_accesses,
)
from nostall.fusion.codegen.tiling.shared_memory import (
    Arena,
    Buffer,
    SharingRule,
    allocate,
    any_dead_buffer,
)
from nostall.fusion.graph.operations import DTYPE_BYTES

MAX_REMATERIALIZATION_OPTIONS = 16
"""Maximum number of options, from the one that keeps all values on chip."""
MIN_ASYNC_COPY_BYTES = 4
"""Bytes of the smallest ``cp.async``."""
MAX_SHARED_BYTES = 227 * 1024 - 1024
"""Shared memory of a block on Hopper (227 KiB), less 1 KiB for reductions across warps."""


@dataclass(frozen=True)
class OnChipValues:
    """The values of a schedule that stay on chip, with the passes and buffers that follow."""

    schedule: Schedule
    values: frozenset[ValueKey]
    async_copies: bool = False
    """Whether operands are copied to shared memory, a whole row at once, before the first pass that
    needs them, if the hardware can (:func:`can_copy_async`)."""
    peeled: bool = False
    """Whether buffers are indexed by lane (:mod:`nostall.fusion.codegen.tiling.loop_peeling`)."""

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, each with the values that earlier ones keep on chip."""
        passes: list[Pass] = []
        on_chip: frozenset[ValueKey] = frozenset()
        for level in range(max(self.schedule.reduction_level.values(), default=0) + 1):
            current = Pass(self.schedule, level, on_chip)
            passes.append(current)
            on_chip |= self.values.intersection((*current.operands, *current.column_operators))
        return tuple(passes)

    @cached_property
    def passes_using(self) -> dict[ValueKey, tuple[int, ...]]:
        """For each value on chip, the passes that compute or read it; the first one stores it."""
        numbers_by_value: dict[ValueKey, list[int]] = {}
        for number, current in enumerate(self.passes):
            for value in dict.fromkeys((*current.operands, *current.column_operators)):
                if value in self.values:
                    numbers_by_value.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in numbers_by_value.items()}

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """A buffer for each value on chip, in the order in which passes store them."""
        buffers = []
        for name, (value, numbers) in enumerate(self.passes_using.items()):
            element_bytes = DTYPE_BYTES[storage_dtype(self.schedule, value)]
            is_prefetched = self.is_prefetched(value)
            buffers.append(Buffer(name, numbers[0], numbers[-1], element_bytes, is_prefetched))
        return tuple(buffers)

    @cached_property
    def vector_elements(self) -> int:
        """Contiguous elements of a thread: as many of the widest dtype as one access takes."""
        return VECTOR_BYTES // max(
            DTYPE_BYTES[storage_dtype(self.schedule, value)] for value in self.passes_using
        )

    def is_prefetched(self, value: ValueKey) -> bool:
        """Whether a value is copied to shared memory before the first pass that needs it."""
        if (
            not self.async_copies
            or isinstance(value, int)
            or not can_copy_async(self.schedule, value, self.peeled)
        ):
            return False
        return (
            self.vector_elements * DTYPE_BYTES[storage_dtype(self.schedule, value)]
            >= MIN_ASYNC_COPY_BYTES
        )

    def without_single_use(self) -> OnChipValues:
        """A copy without the values that no later pass reads."""
        used = frozenset(value for value, numbers in self.passes_using.items() if len(numbers) > 1)
        return replace(self, values=used)

    def arena(self, chunk_lanes: int, may_reuse: SharingRule = any_dead_buffer) -> Arena:
        """The shared-memory allocation for passes in chunks of ``chunk_lanes`` lanes."""
        chunks = -(-lanes_per_row(self.schedule, self.peeled) // chunk_lanes)
        return allocate(self.buffers, chunks, chunk_lanes, may_reuse)


def operand_values(schedule: Schedule, index: int) -> list[ValueKey]:
    """The values that an operator reads: operators of the pattern, and operands in memory."""
    mapping = schedule.mapping
    computed = mapping.accesses
    operands = mapping.operands[index]
    return [
        o.source if o.source in computed else o
        for o in operands
        if o.source in computed or mapping.is_in_memory(o)
    ]


def storage_dtype(schedule: Schedule, value: ValueKey) -> str:
    """The dtype of a value in shared memory, which holds it exactly.

    It is narrow only if the value has been rounded to a narrow dtype already.
    """
    graph = schedule.mapping.graph
    node = graph[value if isinstance(value, int) else value.source]
    is_rounded = not isinstance(value, int) or node.op == "cast"
    dtype = node.dtype if is_rounded else compute_dtype(node.dtype)
    # Shared memory has no single bits; fp16 holds all fp8 numbers exactly.
    return "int8" if dtype == "bool" else "float16" if dtype.startswith("float8") else dtype


@lru_cache(maxsize=16)
def rematerialization_options(
    schedule: Schedule, async_copies: bool = False, is_peeled: bool = False
) -> tuple[OnChipValues, ...]:
    """Sets of values to keep on chip, from all that several passes need to fewer and fewer bytes.

    With ``async_copies`` only sets with at least one value that is copied asynchronously.
    """
    rematerialized: set[ValueKey] = set()
    all_values = frozenset(_on_chip_candidates(schedule))
    options: list[OnChipValues] = []
    for _ in range(len(all_values)):
        option = OnChipValues(
            schedule, all_values - rematerialized, async_copies, is_peeled
        ).without_single_use()
        if not option.values or len(options) == MAX_REMATERIALIZATION_OPTIONS:
            break
        is_valid = not async_copies or any(buffer.is_prefetched for buffer in option.buffers)
        if is_valid and (not options or _arena_bytes(option) < _arena_bytes(options[-1])):
            options.append(option)
        rematerialized.add(
            min(option.values, key=lambda value: _rematerialization_cost(schedule, value))
        )
    return tuple(options)


def _arena_bytes(option: OnChipValues) -> int:
    return option.arena(lanes_per_row(option.schedule, option.peeled)).total_bytes


def _rematerialization_cost(schedule: Schedule, value: ValueKey) -> tuple[int, int, str]:
    """Sort key of values: the cheapest one to rematerialize is first."""
    if isinstance(value, Operand):
        return 2, -value.source, str(value)
    return int(schedule.mapping.graph[value].kind != "light"), -value, ""


def _on_chip_candidates(schedule: Schedule) -> Iterable[ValueKey]:
    """Values with an element for each row and column; values that all rows share stay in L2."""
    column_values = values_along(schedule, schedule.columns)
    row_values = values_along(schedule, schedule.rows)
    for value in column_values:
        is_in_tile = value in row_values or not schedule.rows
        if is_in_tile and value not in schedule.mapping.reduced_loops:
            yield value


def values_along(schedule: Schedule, loops: Iterable[int]) -> frozenset[ValueKey]:
    """The values that vary along ``loops``; all other values are broadcast along them."""
    mapping, varying_loops = schedule.mapping, set(loops)
    values: set[ValueKey] = {
        o for o in mapping.memory_operands if loops_used(o.accesses) & varying_loops
    }
    for index in schedule.body:
        reduced = mapping.reduced_loops.get(index, frozenset())
        reads_counter = any(
            mapping.graph[o.source].op == "iota" and loops_used(o.accesses) & varying_loops
            for o in mapping.operands[index]
        )
        if not reduced & varying_loops and (
            reads_counter or any(s in values for s in operand_values(schedule, index))
        ):
            values.add(index)
    return frozenset(values)


def can_copy_async(schedule: Schedule, operand: Operand, is_peeled: bool = False) -> bool:
    """Whether the hardware can copy an operand to shared memory asynchronously.

    The dtype in shared memory has to be that in memory.  Unless the kernel is peeled, columns have
    to be contiguous, and every row has to begin and end at a multiple of 4 bytes.  The launch
    ensures that the tensor itself is aligned.
    """
    node, sizes = schedule.mapping.graph[operand.source], schedule.mapping.loop_sizes
    if storage_dtype(schedule, operand) != node.dtype:
        return False
    if is_peeled:
        return is_peeled_operand(schedule, operand)
    offset = tensor_offset(operand.accesses, node.strides, sizes)
    row_strides = [offset.strides.get(loop, 0) for loop in schedule.rows]
    aligned_elements = math.gcd(schedule.column_count, offset.start, *row_strides)
    return (
        offset_terms(offset, schedule.columns, sizes, "c") == ["c"]
        and aligned_elements * DTYPE_BYTES[node.dtype] % MIN_ASYNC_COPY_BYTES == 0
    )


def illegal_on_chip_reason(
    schedule: Schedule, rematerialized: int, chunk_lanes: int, async_copies: bool, is_peeled: bool
) -> str | None:
    """Why a schedule cannot run in chunks with values on chip; None if it can.

    ``rematerialized``: index of the set of values in :func:`rematerialization_options`.
    """
    graph, mapping = schedule.mapping.graph, schedule.mapping
    if schedule.kind != "rows":
        return "shared memory keeps the columns of rows that are reduced; there are none"
    column_values = values_along(schedule, schedule.columns)
    for index in schedule.body:
        if graph[index].op == "random":
            return f"{graph[index]}: Gluon has no random numbers"
        if mapping.reduced_loops.get(index) and not any(
            s in column_values for s in operand_values(schedule, index)
        ):
            return f"{graph[index]}: Gluon has no broadcast for a value that all columns share"
    options = rematerialization_options(schedule, async_copies, is_peeled)
    if rematerialized >= len(options):
        action = "copied asynchronously" if async_copies else "kept on chip"
        return (
            f"rematerialization option {rematerialized}; there are {len(options)} with values "
            f"{action} for a later pass"
        )
    if is_peeled and not widens_accesses(schedule, options[rematerialized].vector_elements):
        return "no access would be wider by lanes than it is by columns"
    needed = options[rematerialized].arena(chunk_lanes).total_bytes
    if needed > MAX_SHARED_BYTES:
        return f"{needed} bytes of shared memory; at most {MAX_SHARED_BYTES}"
    return None
