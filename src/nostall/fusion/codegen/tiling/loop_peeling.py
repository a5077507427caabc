"""Rows that begin at odd places, walked over 16 bytes at a time.

A row of 50,257 fp16 begins at a multiple of 16 bytes once in eight rows, so Triton reads and writes
it element by element.  Peeled kernels walk from the last multiple before the row: the *lanes* of a
program count from there, ``ahead`` of them belong to the row before.  Loads take all 16 bytes of
which some are in the row: never before the tensor's first element, and as for its last, what the
last row has beyond a multiple is loaded one by one.  Stores write 16 bytes that are all in the
row, and one by one what is beside them.  All that holds for offsets, so a tensor that itself begins
at an odd place is as safe, only slower.  What is kept in shared memory lies there by lane; copies
to it take what loads take at once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.addresses import offset_terms, tensor_offset
from nostall.fusion.codegen.loops.mapping import AxisAccess, Operand
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.graph.operations import DTYPE_BYTES

VECTOR_BYTES = 16
"""Of an access as wide as a thread can have it."""


@dataclass(frozen=True)
class Peeling:
    """Tensors whose rows lie ``row_stride`` elements apart; ``vector_elements`` elements of the narrowest of them
    are 16 bytes.  ``is_interior``: all lanes of a turn are columns, and no access is cut."""

    row_stride: int
    vector_elements: int
    is_interior: bool = False

    @property
    def row_offset(self) -> str:
        """Where a row begins, as addresses have it."""
        return f"r * {self.row_stride}"

    def write_row_bounds(self, lines: Lines, columns: int, rows: str) -> None:
        """Where the lanes of a program's row, number ``pid`` of ``rows``, begin and end."""
        step, stride = self.vector_elements, self.row_stride
        lines(f"base = pid * {stride} // {step} * {step}")
        lines(f"ahead = pid * {stride} - base")
        lines(f"lowest = (ahead + {step - 1}) // {step} * {step}")
        lines(f"highest = (ahead + {columns}) // {step} * {step}")
        lines(f"behind = (({rows} - 1) * {stride} + {columns} - base) // {step} * {step}")
        lines(f"whole = tl.minimum((ahead + {columns + step - 1}) // {step} * {step}, behind)")

    def write_lane_indices(self, lines: Lines, columns: int, lanes: str) -> None:
        """The lanes of one turn, which columns they are, and which of these exist; ``lanes_per_row`` are
        those of a turn that begins at 0."""
        lines(f"lane = first + {lanes}")
        lines("c = lane - ahead")
        if not self.is_interior:
            lines(f"inside = (c >= 0) & (c < {columns})")

    def write_load(self, lines: Lines, name: str, memory: str, columns: int) -> None:
        """``name``: what lies in ``memory`` at the lanes of a turn."""
        if self.is_interior:
            lines(f"{name} = tl.load({memory} + base + lane)")
            return
        lines(f"{name} = tl.load({memory} + base + lane, mask=lane < whole)")
        with lines.block(self.tail_condition(columns)):
            lines(f"{name} = tl.where(lane < whole, {name}, {self.tail_load(memory)})")

    def write_async_copy(self, lines: Lines, place: str, memory: str) -> None:
        """Send what :meth:`write_load` loads at once on its way to a ``place`` in shared memory."""
        lines(f"copy_ahead({place}, {memory} + base + lane, mask=lane < whole)")

    def tail_condition(self, columns: int) -> str:
        """The head of what is done where a row has elements that are loaded one by one: fewer than
        ``vector_elements``, all of one turn."""
        return f"if whole < ahead + {columns}:"

    def tail_load(self, memory: str) -> str:
        """Those elements, at their lanes."""
        return f"tl.load({memory} + base + lane, mask=inside & (lane >= whole))"

    def write_store(self, lines: Lines, memory: str, text: str, width: int) -> None:
        """Put a value into ``memory``."""
        if self.is_interior:
            lines(f"tl.store({memory} + base + lane, {text})")
            return
        within = "(lane >= lowest) & (lane < highest)"
        lines(f"tl.store({memory} + base + lane, {text}, mask={within})")
        with lines.block(f"if (first < lowest) | (first + {width} > highest):"):
            beside = "inside & ((lane < lowest) | (lane >= highest))"
            lines(f"tl.store({memory} + base + lane, {text}, mask={beside})")


@lru_cache(maxsize=32)
def find_peeling(schedule: Schedule) -> Peeling | None:
    """How the rows of a schedule are peeled; None where they begin at multiples of 16 bytes, or
    where no tensor has its columns one after the other."""
    bytes_of: Counter[int] = Counter()
    narrowest: dict[int, int] = {}
    for node, places in _memory_tensors(schedule):
        stride = _row_stride(schedule, node, places)
        if stride is not None:
            size = DTYPE_BYTES[schedule.mapping.graph[node].dtype]
            bytes_of[stride] += size
            narrowest[stride] = min(size, narrowest.get(stride, size))
    odd = {s: count for s, count in bytes_of.items() if s * narrowest[s] % VECTOR_BYTES}
    if schedule.kind != "rows" or not odd:
        return None
    stride = max(odd, key=lambda s: (odd[s], s))
    return Peeling(stride, VECTOR_BYTES // narrowest[stride])


def lanes_per_row(schedule: Schedule, is_peeled: bool) -> int:
    """Lanes that a walk over a row has at most: its columns, and what is peeled before them."""
    lies = find_peeling(schedule) if is_peeled else None
    return schedule.column_count + (lies.vector_elements - 1 if lies else 0)


def widens_accesses(schedule: Schedule, neighbours: int) -> bool:
    """Whether some accesses are wider by lanes than by columns, where each thread has so many
    elements side by side."""
    lies = find_peeling(schedule)
    if lies is None:
        return False
    together = math.gcd(lies.row_stride, schedule.column_count)
    sizes = (
        DTYPE_BYTES[schedule.mapping.graph[node].dtype]
        for node, places in _memory_tensors(schedule)
        if _row_stride(schedule, node, places) == lies.row_stride
    )
    return any(together * size % min(VECTOR_BYTES, neighbours * size) for size in sizes)


def is_peeled_operand(schedule: Schedule, operand: Operand) -> bool:
    """Whether a tensor is read by lanes where rows are peeled."""
    lies = find_peeling(schedule)
    return (
        lies is not None
        and _row_stride(schedule, operand.source, operand.accesses) == lies.row_stride
    )


def _memory_tensors(schedule: Schedule) -> Iterator[tuple[int, tuple[AxisAccess, ...]]]:
    """What is read and written, and where."""
    yield from ((operand.source, operand.accesses) for operand in schedule.mapping.memory_operands)
    yield from ((index, schedule.mapping.accesses[index]) for index in schedule.mapping.outputs)


def _row_stride(schedule: Schedule, node: int, places: tuple[AxisAccess, ...]) -> int | None:
    """From one row to the next, of a tensor whose rows and columns lie as they are counted."""
    graph, sizes = schedule.mapping.graph, schedule.mapping.loop_sizes
    if graph[node].kind == "constant":
        return None
    where = tensor_offset(places, graph[node].strides, sizes)
    by_row, by_column = (
        offset_terms(where, loops, sizes, "i") for loops in (schedule.rows, schedule.columns)
    )
    if where.start or by_column != ["i"] or len(by_row) != 1 or not by_row[0].startswith("i * "):
        return None
    return int(by_row[0].removeprefix("i * "))
