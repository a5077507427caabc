"""Modelled cost of one tile of a warp: instructions, registers, barriers, layout conversions.

Triton's blocked layout spreads the elements of a tile over the threads of a program. Contiguous
elements go to one thread up to one access of 16 bytes, then to the lanes of a warp, then to the
next warp. Lanes and warps that are left are spread along the other axis. So several warps share a
row if the row is long enough, however many rows the tile has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from nostall.fusion.codegen.cost.coefficients import (
    CostCoefficients,
    elements_per_philox_counter,
    operator_cost,
    uses_int64,
)
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule, block_columns
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE
from nostall.fusion.graph.operations import DTYPE_BYTES

ACCESS_BYTES = 16
"""The widest access of one thread."""


@dataclass(frozen=True, slots=True)
class ThreadLayout:
    """The share of one thread in a tile."""

    elements_per_thread: int
    rows_per_thread: int
    vector: int  # contiguous elements of a thread
    lanes_per_row: int  # lanes of a warp that share a row
    warps_per_row: int


def thread_layout(
    rows: int, columns: int, warps: int, max_vector: int, along_rows: bool = False
) -> ThreadLayout:
    """The layout of a tile of ``rows`` by ``columns``, both powers of two.

    ``max_vector``: elements of one access. ``along_rows``: contiguous elements are those of one
    column.
    """
    fast, slow = (rows, columns) if along_rows else (columns, rows)
    vector = max(1, min(max_vector, fast, rows * columns // (WARP_SIZE * warps)))
    fast_lanes = min(WARP_SIZE, max(1, fast // vector))
    fast_warps = min(warps, max(1, fast // (vector * fast_lanes)))
    slow_lanes, slow_warps = WARP_SIZE // fast_lanes, warps // fast_warps
    fast_elements = max(vector, fast // (fast_lanes * fast_warps))
    slow_elements = max(1, slow // (slow_lanes * slow_warps))
    elements = fast_elements * slow_elements
    if along_rows:
        warps_per_row = min(slow_warps, -(-slow // slow_lanes))
        return ThreadLayout(elements, fast_elements, vector, slow_lanes, warps_per_row)
    return ThreadLayout(elements, slow_elements, vector, fast_lanes, fast_warps)


_MAX_UNROLLED_ELEMENTS = 32
"""Elements of a thread whose loads are in flight together: ptxas unrolls loops up to that."""
_MAX_ITERATIONS_IN_FLIGHT = 2.0
"""Iterations of a loop whose loads are in flight together, at most. Chosen among 1, 2 and 4 by the
measured plans of the train half of the generated chains (``fusion.cost_model_fit --set train``)."""
_CONVERSION_SCRATCH_BYTES = 32768
"""Shared memory through which Triton converts a layout at once; seen in sm_90 code."""
_DEFAULT_VECTOR = 4
"""Contiguous elements of a thread if no tensor decides how many there are."""


@dataclass(frozen=True, slots=True)
class TileWork:
    """Operators, stores and loop of a program for one tile."""

    operators: Collection[int]
    outputs: Collection[int]  # the operators whose results are stored
    accumulators: int = 0  # tiles that stay in registers over all iterations of a loop
    loop: Literal["rows", "columns"] | None = None  # whether the tile is one loop iteration


@dataclass(frozen=True, slots=True)
class TileCost:
    """Modelled cost of one tile."""

    instructions: float  # of a warp
    registers: float  # of a thread
    elements: float  # of a thread
    accesses: float  # the fewest loads that reach all elements of a thread
    conversion_bytes: int  # shared memory for layout conversions
    barriers: int


@dataclass(frozen=True, slots=True)
class _Access:
    """A tensor that a tile reads or writes column by column."""

    element_bytes: int
    max_vector: int  # elements of one access, at most
    has_rows: bool
    is_written: bool


def dependent_loads(iterations: int, elements: float) -> float:
    """Loads of a loop that wait for earlier ones; ``elements``: of a thread in an iteration."""
    in_flight = max(1.0, min(_MAX_ITERATIONS_IN_FLIGHT, _MAX_UNROLLED_ELEMENTS / elements))
    return math.ceil(iterations / in_flight)


def tile_cost(
    kernel: PlannedKernel, chunks: Sequence[int], work: TileWork, coefficients: CostCoefficients
) -> TileCost:
    """The modelled cost of a tile of these chunks of columns."""
    return _TileModel(kernel, chunks, work, coefficients).cost()


class _TileModel:
    """Adds up the cost of a tile, chunk by chunk."""

    def __init__(
        self,
        kernel: PlannedKernel,
        chunks: Sequence[int],
        work: TileWork,
        coefficients: CostCoefficients,
    ) -> None:
        self.schedule, self.plan = kernel.schedule, kernel.plan
        self.chunks, self.work, self.coefficients = chunks, work, coefficients
        self.is_flat = self.plan.scheme == "thread"
        self.rows = 1 if self.is_flat else self.plan.rows
        self.is_column_major = not self.is_flat and self.schedule.is_column_major
        self.has_equal_chunks = len(set(chunks)) == 1
        self.tensors = self._tensors()
        # Triton gives tensors of one shape the layout of the one with the widest accesses.
        vectors = [t.max_vector for t in self.tensors if t.has_rows or self.rows == 1]
        self.broadcast_vectors = [
            t.max_vector for t in self.tensors if not (t.has_rows or self.rows == 1)
        ]
        vector = max(vectors, default=_DEFAULT_VECTOR)
        self.layouts = [
            thread_layout(self.rows, width, self.plan.num_warps, vector, self.is_column_major)
            for width in chunks
        ]
        self.instructions = self.elements = self.converted_elements = 0.0
        self.barriers = 0

    def cost(self) -> TileCost:
        for at, (width, layout) in enumerate(zip(self.chunks, self.layouts, strict=True)):
            self._add_chunk(at, width, layout)
        self._add_chunk_conversions()
        conversion_bytes = 0
        if self.converted_elements:
            conversion_bytes = min(_CONVERSION_SCRATCH_BYTES, 4 * self.rows * max(self.chunks))
        self.instructions += self.coefficients.layout_conversion * self.converted_elements
        return TileCost(
            instructions=self.instructions,
            registers=self._registers(),
            elements=self.elements,
            accesses=sum(max(1.0, each.elements_per_thread / each.vector) for each in self.layouts),
            conversion_bytes=conversion_bytes,
            # A single warp exchanges values between lanes, without barriers.
            barriers=self.barriers if self.plan.num_warps > 1 else 0,
        )

    # -- instructions ------------------------------------------------------------------------------

    def _add_chunk(self, at: int, width: int, layout: ThreadLayout) -> None:
        coefficients = self.coefficients
        self.elements += layout.elements_per_thread
        is_repeated = self.work.loop == "columns" or (self.has_equal_chunks and at > 0)
        self.instructions += coefficients.iteration if is_repeated else coefficients.chunk
        self.instructions += self._operator_instructions(layout)
        reductions = sum(map(self.schedule.removes_columns, self.work.operators))
        # Equal chunks are combined before warps exchange anything.
        crosses_warps = layout.warps_per_row > 1 and not (self.has_equal_chunks and at > 0)
        crossing = reductions * crosses_warps
        crossing += sum(
            block_columns(self.schedule.mapping, i) > layout.vector * layout.lanes_per_row
            for i in self.schedule.block_reductions
            if i in self.work.operators
        )
        self.instructions += coefficients.cross_warp * layout.rows_per_thread * crossing
        self.barriers += 2 * crossing
        self._add_accesses(layout)
        self._add_broadcast_conversion(width, layout)

    def _add_accesses(self, layout: ThreadLayout) -> None:
        for tensor in self.tensors:
            elements = layout.elements_per_thread / (
                1 if tensor.has_rows else layout.rows_per_thread
            )
            vector = min(layout.vector, tensor.max_vector)
            self.instructions += self.coefficients.access * max(1.0, elements / vector)
            if tensor.is_written and layout.vector * tensor.element_bytes > ACCESS_BYTES:
                self.converted_elements += elements * tensor.element_bytes / 4
                self.barriers += 2

    def _add_broadcast_conversion(self, width: int, layout: ThreadLayout) -> None:
        """Tensors without rows may have another layout than the tile."""
        if not self.broadcast_vectors:
            return
        warps, vector = self.plan.num_warps, max(self.broadcast_vectors)
        if _layout_key(thread_layout(1, width, warps, vector)) == _layout_key(layout):
            return
        elements = layout.elements_per_thread
        if self.is_column_major:
            # The tensor without rows is converted to the layout of the tile.
            self.converted_elements += elements / layout.rows_per_thread
            self.barriers += 2
        else:
            # The tile is converted there and back, around the operators that read that tensor.
            self.converted_elements += 2 * elements
            self.barriers += 4

    def _add_chunk_conversions(self) -> None:
        """Reduced chunks are combined in one layout; operators after a reduction start from it."""
        if len({_layout_key(layout) for layout in self.layouts}) > 1:
            times = max(1, max(self.schedule.reduction_level.values(), default=0) - 1)
            largest = max(layout.elements_per_thread for layout in self.layouts)
            self.converted_elements += times * largest
            self.barriers += 2 * times

    def _operator_instructions(self, layout: ThreadLayout) -> float:
        """Instructions of the operators, and of a thread's own part of reductions."""
        schedule, is_flat, elements = self.schedule, self.is_flat, layout.elements_per_thread
        instructions = 0.0
        for index in self.work.operators:
            if index in schedule.block_reductions:
                instructions += elements * _block_reduction_instructions(schedule, index, layout)
            elif schedule.removes_columns(index):
                instructions += elements
            elif is_flat or schedule.has_columns(index):
                has_rows = is_flat or self._varies_along_rows(schedule.mapping.loops[index])
                shared_by = 1 if has_rows else layout.rows_per_thread
                if schedule.is_uniform_in_blocks(index):
                    shared_by *= layout.vector
                if schedule.mapping.graph[index].op == "random":
                    shared_by *= self._elements_per_counter(index, layout)
                cost = operator_cost(schedule, index, is_flat, self.coefficients.operators)
                instructions += cost * elements / shared_by
        return instructions

    def _elements_per_counter(self, index: int, layout: ThreadLayout) -> int:
        along_rows = self.is_flat or self.is_column_major
        return elements_per_philox_counter(self.schedule, index, layout.vector, along_rows)

    # -- registers ---------------------------------------------------------------------------------

    def _registers(self) -> float:
        coefficients, plan = self.coefficients, self.plan
        per_element = self._registers_per_element() + self.work.accumulators
        has_int64 = any(
            uses_int64(self.schedule, index)
            for index in self.work.operators
            if self.is_flat or self.schedule.has_columns(index)
        )
        per_element += coefficients.int64_registers * has_int64
        per_element += coefficients.row_loop_registers * (self.work.loop == "rows")
        extra_chunks = 0 if self.has_equal_chunks else len(self.chunks) - 1
        registers = (
            coefficients.base_registers
            + coefficients.extra_chunk_registers * extra_chunks
            + self.elements * per_element
        )
        registers += coefficients.peeling_registers * plan.peeled
        copies_in_loops = plan.async_copies and plan.scheme == "looped"
        registers += coefficients.async_copy_registers * copies_in_loops
        return registers

    def _registers_per_element(self) -> float:
        coefficients = self.coefficients
        reads = [tensor for tensor in self.tensors if not tensor.is_written]
        with_rows = sum(tensor.has_rows for tensor in reads)
        operands = coefficients.row_operand_registers * with_rows
        operands += coefficients.broadcast_operand_registers * (len(reads) - with_rows)
        counters = coefficients.philox_registers * self._philox_counters_per_element()
        return coefficients.element_registers + operands + counters

    def _philox_counters_per_element(self) -> float:
        """Philox counters that an element needs at once, for the tensor that needs the most."""
        graph, layout = self.schedule.mapping.graph, self.layouts[0]
        random = [index for index in self.work.operators if graph[index].op == "random"]
        return max((1 / self._elements_per_counter(index, layout) for index in random), default=0.0)

    # -- tensors -----------------------------------------------------------------------------------

    def _tensors(self) -> list[_Access]:
        """The tensors that are read or written column by column, each place once."""
        schedule = self.schedule
        columns = set(schedule.rows if self.is_flat else schedule.columns)
        tensors = []
        for key, (node, loops) in self._touched().items():
            if not loops & columns:
                continue
            is_written = key in self.work.outputs
            has_rows = not self.is_flat and bool(loops & set(schedule.rows))
            if not is_written:
                has_rows = has_rows and self._varies_along_rows(loops)
            element_bytes = DTYPE_BYTES[schedule.mapping.graph[node].dtype]
            max_vector = self._max_vector(element_bytes, has_rows)
            tensors.append(_Access(element_bytes, max_vector, self.is_flat or has_rows, is_written))
        return tensors

    def _varies_along_rows(self, loops: frozenset[int]) -> bool:
        """Whether a value with these loops has several values along the rows of a tile.

        A row block that starts at a multiple of its rows may be one row of a tensor.
        """
        if not loops & set(self.schedule.rows):
            return False
        has_blocks = self.rows > 1 and self.plan.scheme != "column"
        return not (has_blocks and self.schedule.is_block_uniform(loops, self.rows))

    def _max_vector(self, element_bytes: int, has_rows: bool) -> int:
        """Elements of one access: where a row starts decides, except along rows or with peeling."""
        row_bytes = ACCESS_BYTES
        if has_rows and not (self.is_column_major or self.plan.peeled):
            row_bytes = self.schedule.column_count * element_bytes
        return max(1, math.gcd(ACCESS_BYTES, row_bytes) // element_bytes)

    def _touched(self) -> dict[int | Operand, tuple[int, frozenset[int]]]:
        """Memory operands and outputs, each with its node and loops."""
        mapping = self.schedule.mapping
        touched: dict[int | Operand, tuple[int, frozenset[int]]] = {}
        for index in self.work.operators:
            for operand in mapping.operands[index]:
                if mapping.is_in_memory(operand):
                    touched[operand] = (operand.source, loops_used(operand.accesses))
            if index in self.work.outputs:
                touched[index] = (index, mapping.loops[index])
        return touched


def _block_reduction_instructions(schedule: Schedule, index: int, layout: ThreadLayout) -> float:
    """Modelled instructions of a block reduction for each element.

    One in the thread, and a shuffle and one for each halving of the lanes that share a block.
    """
    lanes = max(1.0, block_columns(schedule.mapping, index) / layout.vector)
    return 1 + 2 * math.log2(lanes) / layout.vector


def _layout_key(layout: ThreadLayout) -> tuple[int, int, int]:
    """Tensors with the same key combine without a conversion through shared memory."""
    return layout.vector, layout.lanes_per_row, layout.warps_per_row
