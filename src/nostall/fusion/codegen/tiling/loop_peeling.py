"""Loop peeling for unaligned rows: 16-byte accesses to rows that begin at any element.

Of rows of 50,257 fp16 elements, one in eight begins at a multiple of 16 bytes, so Triton reads and
writes them element by element.  A peeled kernel starts its loop at the last multiple of 16 bytes
before the row.  The *lanes* of a program count from there; the first ``ahead`` lanes belong to the
row before.

- Loads read every 16-byte vector that has an element of the row.  They never read before the first
  element of the tensor.  At its end, the elements of the last row after the last full vector are
  loaded one by one.
- Stores write a vector at once if all of it is in the row, and the elements before and after these
  vectors one by one.
- Alignment refers to offsets within the tensor.  If the tensor itself begins at an unaligned
  address, the kernel is slower, but correct.
- Values in shared memory are indexed by lane.  Asynchronous copies take the full vectors.
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
"""Bytes of the widest access of a thread."""


@dataclass(frozen=True)
class Peeling:
    """The lane layout of tensors with one row stride, and the source that accesses them."""

    row_stride: int  # elements
    vector_elements: int  # elements in 16 bytes, for the narrowest dtype of these tensors
    is_interior: bool = False
    """Whether all lanes of an iteration are columns of the row, so no access needs a mask."""

    @property
    def row_offset(self) -> str:
        """The address term of the first element of a row."""
        return f"r * {self.row_stride}"

    def write_row_bounds(self, lines: Lines, columns: int, rows: str) -> None:
        """Define the lane bounds of row ``pid`` of ``rows``.

        - ``base``: offset of lane 0; ``ahead``: lane of the first column
        - ``lowest``, ``highest``: lanes of the vectors that are completely in the row
        - ``behind``: lane after the last full vector of the tensor
        - ``whole``: lane after the vectors that are loaded at once
        """
        step, stride = self.vector_elements, self.row_stride
        lines(f"base = pid * {stride} // {step} * {step}")
        lines(f"ahead = pid * {stride} - base")
        lines(f"lowest = (ahead + {step - 1}) // {step} * {step}")
        lines(f"highest = (ahead + {columns}) // {step} * {step}")
        lines(f"behind = (({rows} - 1) * {stride} + {columns} - base) // {step} * {step}")
        lines(f"whole = tl.minimum((ahead + {columns + step - 1}) // {step} * {step}, behind)")

    def write_lane_indices(self, lines: Lines, columns: int, lanes: str) -> None:
        """Define the lanes of one iteration, their columns, and a mask of columns that exist.

        ``lanes``: expression of the lanes of an iteration that begins at lane 0.
        """
        lines(f"lane = first + {lanes}")
        lines("c = lane - ahead")
        if not self.is_interior:
            lines(f"inside = (c >= 0) & (c < {columns})")

    def write_load(self, lines: Lines, name: str, memory: str, columns: int) -> None:
        """Load the lanes of an iteration from ``memory`` into variable ``name``."""
        if self.is_interior:
            lines(f"{name} = tl.load({memory} + base + lane)")
            return
        lines(f"{name} = tl.load({memory} + base + lane, mask=lane < whole)")
        with lines.block(self.tail_condition(columns)):
            lines(f"{name} = tl.where(lane < whole, {name}, {self.tail_load(memory)})")

    def write_async_copy(self, lines: Lines, destination: str, memory: str) -> None:
        """Start an asynchronous copy to shared memory of the vectors :meth:`write_load` loads."""
        lines(f"copy_ahead({destination}, {memory} + base + lane, mask=lane < whole)")

    def tail_condition(self, columns: int) -> str:
        """The ``if`` line of the code for elements that are loaded one by one.

        A row has fewer than ``vector_elements`` of them, all in one iteration.
        """
        return f"if whole < ahead + {columns}:"

    def tail_load(self, memory: str) -> str:
        """The load of these elements, at their lanes."""
        return f"tl.load({memory} + base + lane, mask=inside & (lane >= whole))"

    def write_store(self, lines: Lines, memory: str, text: str, width: int) -> None:
        """Store the value ``text`` to ``memory``; an iteration has ``width`` lanes."""
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
    """The peeling for the row stride that moves the most bytes, of those that are unaligned.

    None if all rows begin at multiples of 16 bytes, or if no tensor has contiguous columns.
    """
    bytes_by_stride: Counter[int] = Counter()
    min_element_bytes: dict[int, int] = {}
    for node, accesses in _memory_tensors(schedule):
        stride = _row_stride(schedule, node, accesses)
        if stride is not None:
            size = DTYPE_BYTES[schedule.mapping.graph[node].dtype]
            bytes_by_stride[stride] += size
            min_element_bytes[stride] = min(size, min_element_bytes.get(stride, size))
    unaligned = {
        stride: count
        for stride, count in bytes_by_stride.items()
        if stride * min_element_bytes[stride] % VECTOR_BYTES
    }
    if schedule.kind != "rows" or not unaligned:
        return None
    stride = max(unaligned, key=lambda s: (unaligned[s], s))
    return Peeling(stride, VECTOR_BYTES // min_element_bytes[stride])


def lanes_per_row(schedule: Schedule, is_peeled: bool) -> int:
    """The maximum number of lanes of a row: its columns and the peeled lanes before them."""
    peeling = find_peeling(schedule) if is_peeled else None
    return schedule.column_count + (peeling.vector_elements - 1 if peeling else 0)


def widens_accesses(schedule: Schedule, thread_elements: int) -> bool:
    """Whether peeling makes an access wider if a thread has this many contiguous elements."""
    peeling = find_peeling(schedule)
    if peeling is None:
        return False
    aligned_elements = math.gcd(peeling.row_stride, schedule.column_count)
    sizes = (
        DTYPE_BYTES[schedule.mapping.graph[node].dtype]
        for node, accesses in _memory_tensors(schedule)
        if _row_stride(schedule, node, accesses) == peeling.row_stride
    )
    return any(
        aligned_elements * size % min(VECTOR_BYTES, thread_elements * size) for size in sizes
    )


def is_peeled_operand(schedule: Schedule, operand: Operand) -> bool:
    """Whether a peeled kernel reads an operand by lane."""
    peeling = find_peeling(schedule)
    return (
        peeling is not None
        and _row_stride(schedule, operand.source, operand.accesses) == peeling.row_stride
    )


def _memory_tensors(schedule: Schedule) -> Iterator[tuple[int, tuple[AxisAccess, ...]]]:
    """The tensors that the kernel reads or writes, as (node, accesses)."""
    yield from ((operand.source, operand.accesses) for operand in schedule.mapping.memory_operands)
    yield from ((index, schedule.mapping.accesses[index]) for index in schedule.mapping.outputs)


def _row_stride(schedule: Schedule, node: int, accesses: tuple[AxisAccess, ...]) -> int | None:
    """Elements between adjacent rows; None unless columns are contiguous and rows equidistant."""
    graph, sizes = schedule.mapping.graph, schedule.mapping.loop_sizes
    if graph[node].kind == "constant":
        return None
    offset = tensor_offset(accesses, graph[node].strides, sizes)
    row_terms, column_terms = (
        offset_terms(offset, loops, sizes, "i") for loops in (schedule.rows, schedule.columns)
    )
    if offset.start or column_terms != ["i"] or len(row_terms) != 1:
        return None
    (row_term,) = row_terms
    return int(row_term.removeprefix("i * ")) if row_term.startswith("i * ") else None
