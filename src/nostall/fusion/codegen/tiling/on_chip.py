"""What a row leaves in shared memory from one pass to the next, and what is computed again.

Block composition (arXiv:2009.10924): a value that several passes over the columns need is kept on
chip.  Where that takes too much, values are demoted, one after the other, to being computed again
(arXiv:1811.05213): cheap operators, then expensive ones, of equal ones the nearest to the root
first, and at last what was read, which is then read again.
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
    Reuse,
    allocate,
    immediate_postdominators,
)
from nostall.fusion.graph.operations import DTYPE_BYTES

MAX_REMATERIALIZATION_OPTIONS = 16
"""Ways to keep less that are looked at, from everything on."""
MIN_ASYNC_COPY_BYTES = 4
"""The least that ``cp.async`` copies at a time."""
MAX_SHARED_BYTES = 227 * 1024 - 1024
"""Shared memory of a block on Hopper, less what reductions across warps are given of it."""


@dataclass(frozen=True)
class OnChipValues:
    """Which values of a schedule stay on chip; passes and buffers follow from it.

    ``async_copies``: what is read from memory is copied to shared memory, a whole row at once, before the
    pass that needs it first, where the hardware can (:func:`can_copy_async`).  ``peeled``: values lie by
    lane (:mod:`nostall.fusion.codegen.tiling.loop_peeling`).
    """

    schedule: Schedule
    values: frozenset[ValueKey]
    async_copies: bool = False
    peeled: bool = False

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """The passes, each with what earlier ones left on chip."""
        found: list[Pass] = []
        there: frozenset[ValueKey] = frozenset()
        for level in range(max(self.schedule.reduction_level.values(), default=0) + 1):
            part = Pass(self.schedule, level, there)
            found.append(part)
            there |= self.values.intersection((*part.operands, *part.column_operators))
        return tuple(found)

    @cached_property
    def passes_using(self) -> dict[ValueKey, tuple[int, ...]]:
        """Of every value that is kept the passes that make or read it: the first one leaves it."""
        found: dict[ValueKey, list[int]] = {}
        for number, part in enumerate(self.passes):
            for value in dict.fromkeys((*part.operands, *part.column_operators)):
                if value in self.values:
                    found.setdefault(value, []).append(number)
        return {value: tuple(numbers) for value, numbers in found.items()}

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """The values as buffers, in the order in which passes leave them."""
        found = []
        for at, (value, numbers) in enumerate(self.passes_using.items()):
            element = DTYPE_BYTES[storage_dtype(self.schedule, value)]
            found.append(Buffer(at, numbers[0], numbers[-1], element, self.is_prefetched(value)))
        return tuple(found)

    @cached_property
    def vector_elements(self) -> int:
        """Elements side by side that a thread has: of the widest, as many as one access takes."""
        return VECTOR_BYTES // max(
            DTYPE_BYTES[storage_dtype(self.schedule, value)] for value in self.passes_using
        )

    def is_prefetched(self, value: ValueKey) -> bool:
        """Whether a value is copied before the first pass that needs it."""
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
        """The same without values that no later pass reads."""
        used = frozenset(value for value, numbers in self.passes_using.items() if len(numbers) > 1)
        return replace(self, values=used)

    def arena(self, width: int, reuse: Reuse = "order") -> Arena:
        """Places of the buffers in shared memory, for passes in chunks of ``width`` lanes."""
        chunks = -(-lanes_per_row(self.schedule, self.peeled) // width)
        outlives = self.dominated_pairs if reuse == "dominance" else frozenset()
        return allocate(self.buffers, chunks, width, reuse, outlives)

    @cached_property
    def dominated_pairs(self) -> frozenset[tuple[int, int]]:
        """Pairs of buffers (a, b) where the step that makes b dominates the one that makes a."""
        steps, after = self._dataflow_steps()
        above = immediate_postdominators(after)
        makers = [steps[value, numbers[0]] for value, numbers in self.passes_using.items()]
        found = set()
        for a, step in enumerate(makers):
            over = set()
            while (step := above[step]) < len(after):
                over.add(step)
            found |= {(a, b) for b, other in enumerate(makers) if other in over}
        return frozenset(found)

    def _dataflow_steps(self) -> tuple[dict[tuple[ValueKey, int], int], list[list[int]]]:
        """All operators and reads, those that are done again once for each pass, in the order in
        which they run; and of each step those that read what it makes."""
        steps: dict[tuple[ValueKey, int], int] = {}
        after: list[list[int]] = []
        latest: dict[ValueKey, int] = {}
        for number, part in enumerate(self.passes):
            reads: list[ValueKey] = [
                v for v in part.operands if not isinstance(v, int) and v not in part.on_chip
            ]
            narrow = [index for index in part.row_operators if index not in latest]
            for value in [*reads, *sorted({*part.column_operators, *narrow, *part.reductions})]:
                step = steps[value, number] = latest[value] = len(after)
                after.append([])
                for source in (
                    () if not isinstance(value, int) else operand_values(self.schedule, value)
                ):
                    if source in latest:
                        after[latest[source]].append(step)
        return steps, after


def operand_values(schedule: Schedule, index: int) -> list[ValueKey]:
    """What an operator reads: operators of the pattern, and places in memory."""
    mapping = schedule.mapping
    inside = mapping.accesses
    operands = mapping.operands[index]
    return [
        o.source if o.source in inside else o
        for o in operands
        if o.source in inside or mapping.is_in_memory(o)
    ]


def storage_dtype(schedule: Schedule, value: ValueKey) -> str:
    """The dtype in which a value is kept, exactly: narrow only where it is so already."""
    graph = schedule.mapping.graph
    node = graph[value if isinstance(value, int) else value.source]
    narrow = not isinstance(value, int) or node.op == "cast"
    dtype = node.dtype if narrow else compute_dtype(node.dtype)
    # Shared memory has no bits; all numbers of fp8 are numbers of fp16.
    return "int8" if dtype == "bool" else "float16" if dtype.startswith("float8") else dtype


@lru_cache(maxsize=16)
def rematerialization_options(
    schedule: Schedule, ahead: bool = False, is_peeled: bool = False
) -> tuple[OnChipValues, ...]:
    """Ways to run a schedule with a row's values on chip: first all that several passes need, then
    fewer and fewer bytes.  With ``async_copies`` those of which some are copied ahead."""
    demoted: set[ValueKey] = set()
    everything = frozenset(_on_chip_candidates(schedule))
    found: list[OnChipValues] = []
    for _ in range(len(everything)):
        kept = OnChipValues(schedule, everything - demoted, ahead, is_peeled).without_single_use()
        if not kept.values or len(found) == MAX_REMATERIALIZATION_OPTIONS:
            break
        fits = not ahead or any(buffer.is_prefetched for buffer in kept.buffers)
        if fits and (not found or _arena_bytes(kept) < _arena_bytes(found[-1])):
            found.append(kept)
        demoted.add(min(kept.values, key=lambda value: _rematerialization_cost(schedule, value)))
    return tuple(found)


def _arena_bytes(kept: OnChipValues) -> int:
    return kept.arena(lanes_per_row(kept.schedule, kept.peeled)).total_bytes


def _rematerialization_cost(schedule: Schedule, value: ValueKey) -> tuple[int, int, str]:
    """What is dearest to have again comes last."""
    if isinstance(value, Operand):
        return 2, -value.source, str(value)
    return int(schedule.mapping.graph[value].kind != "light"), -value, ""


def _on_chip_candidates(schedule: Schedule) -> Iterable[ValueKey]:
    """Values that have a number for each row and column; what all rows share stays in L2."""
    by_column, by_row = (
        values_along(schedule, schedule.columns),
        values_along(schedule, schedule.rows),
    )
    for value in by_column:
        if (value in by_row or not schedule.rows) and value not in schedule.mapping.reduced_loops:
            yield value


def values_along(schedule: Schedule, loops: Iterable[int]) -> frozenset[ValueKey]:
    """The values that are tensors along ``loops``; of others one element stands for all."""
    mapping, among = schedule.mapping, set(loops)
    found: set[ValueKey] = {o for o in mapping.memory_operands if loops_used(o.accesses) & among}
    for index in schedule.body:
        gone = mapping.reduced_loops.get(index, frozenset())
        counted = any(
            mapping.graph[o.source].op == "iota" and loops_used(o.accesses) & among
            for o in mapping.operands[index]
        )
        if not gone & among and (
            counted or any(s in found for s in operand_values(schedule, index))
        ):
            found.add(index)
    return frozenset(found)


def can_copy_async(schedule: Schedule, operand: Operand, is_peeled: bool = False) -> bool:
    """Whether the hardware can copy an operand to shared memory without registers: as it lies in
    memory, 4 bytes at least at a time, which every row and the last chunk have to be multiples of,
    or by lanes.  (A tensor that begins at an odd place is for the launch to see.)"""
    node, sizes = schedule.mapping.graph[operand.source], schedule.mapping.loop_sizes
    if storage_dtype(schedule, operand) != node.dtype:
        return False
    if is_peeled:
        return is_peeled_operand(schedule, operand)
    where = tensor_offset(operand.accesses, node.strides, sizes)
    by_row = [where.strides.get(loop, 0) for loop in schedule.rows]
    steps = math.gcd(schedule.column_count, where.start, *by_row) * DTYPE_BYTES[node.dtype]
    return (
        offset_terms(where, schedule.columns, sizes, "c") == ["c"]
        and steps % MIN_ASYNC_COPY_BYTES == 0
    )


def illegal_on_chip_reason(
    schedule: Schedule, demoted: int, width: int, ahead: bool, is_peeled: bool
) -> str | None:
    """Why a schedule cannot run in chunks of ``width`` columns with what is left on chip after so
    many demotions; None where it can."""
    graph, mapping = schedule.mapping.graph, schedule.mapping
    if schedule.kind != "rows":
        return "shared memory keeps the columns of rows that are reduced; there are none"
    by_column = values_along(schedule, schedule.columns)
    for index in schedule.body:
        if graph[index].op == "random":
            return f"{graph[index]}: Gluon has no random numbers"
        if mapping.reduced_loops.get(index) and not any(
            s in by_column for s in operand_values(schedule, index)
        ):
            return f"{graph[index]}: Gluon has no broadcast for what is the same in all columns"
    ways = rematerialization_options(schedule, ahead, is_peeled)
    if demoted >= len(ways):
        what = "copy something ahead" if ahead else "keep something"
        return f"{demoted} demotions; there are {len(ways)} ways to {what} for a later pass"
    if is_peeled and not widens_accesses(schedule, ways[demoted].vector_elements):
        return "no access would be wider by lanes than it is by columns"
    needed = ways[demoted].arena(width).total_bytes
    if needed > MAX_SHARED_BYTES:
        return f"{needed} bytes of shared memory; at most {MAX_SHARED_BYTES}"
    return None
