"""Modelled cost of kernels with small batched dots: the scheme ``matrix``.

A program has one element of the batch. Its tensors are spread over all threads, with one or two
long axes each. Factors of a dot, and reductions across warps, go through shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from nostall.fusion.codegen.cost.coefficients import CostCoefficients
from nostall.fusion.codegen.cost.gpu import KernelCost
from nostall.fusion.codegen.cost.operators import operator_cost
from nostall.fusion.codegen.cost.thread_layout import ACCESS_BYTES, thread_layout
from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.tiling.legality import BASE_REGISTERS
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE, group_lanes
from nostall.fusion.graph.operations import DTYPE_BYTES

_MMA_PRODUCTS = 16 * 8 * 16
"""Products of one tensor-core instruction of a warp (``mma.m16n8k16``)."""
_MMA_ROWS = 16
"""Rows of one such instruction. Triton gives the warps of a program different rows; warps behind
the last row repeat the work of others."""
_FACTOR_BYTES = 2
"""Bytes of an element of a tensor-core factor in shared memory."""
_FACTORS_PER_ACCESS = ACCESS_BYTES // _FACTOR_BYTES
SHUFFLE_INSTRUCTIONS = 2.0
"""Instructions of one step of a warp reduction: a shuffle, and one that combines."""


def dot_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost of the only kernel of the scheme ``matrix``."""
    schedule, plan = kernel.schedule, kernel.plan
    mapping, graph = schedule.mapping, schedule.mapping.graph
    model = _DotModel(kernel, coefficients)
    in_memory: set[Operand] = set()
    for index in mapping.operators:
        in_memory.update(filter(mapping.is_in_memory, mapping.operands[index]))
        model.add(index)
    model.instructions += coefficients.access * model.access_count(in_memory)
    moved = sum(graph[index].bytes for index in (*mapping.inputs, *mapping.outputs))
    live = coefficients.live_share * schedule.peak_live_values * sum(plan.chunks)
    return KernelCost(
        programs=schedule.row_count,
        warps=plan.num_warps,
        instructions=model.instructions,
        registers=BASE_REGISTERS + live / model.distinct_threads,
        memory_bytes=moved / schedule.row_count,
        reduction_phases=model.phases,
        barriers=model.barriers if plan.num_warps > 1 else 0,
        shared_bytes=model.shared_bytes,
    )


class _DotModel:
    """Adds up the cost of the operators of a program."""

    def __init__(self, kernel: PlannedKernel, coefficients: CostCoefficients) -> None:
        self.schedule, self.coefficients = kernel.schedule, coefficients
        self.num_warps = kernel.plan.num_warps
        self.lane_counts = group_lanes(kernel.schedule)
        self.threads = WARP_SIZE * self.num_warps
        self.distinct_threads = WARP_SIZE * self._warps_with_distinct_rows()
        self.instructions = coefficients.program
        self.barriers = self.phases = self.shared_bytes = 0

    def add(self, index: int) -> None:
        mapping = self.schedule.mapping
        reduced = mapping.reduced_loops.get(index, frozenset())
        lanes = self._lanes(mapping.loops[index] | reduced)
        elements = max(1.0, lanes / self.distinct_threads)
        if mapping.graph[index].kind == "dot" and all(dot_loops(mapping, index)):
            self._add_matrix_product(index, elements)
        elif reduced:
            self._add_reduction(index, elements)
        else:
            cost = operator_cost(self.schedule, index, False, self.coefficients.operators)
            self.instructions += cost * elements

    def _add_matrix_product(self, index: int, elements: float) -> None:
        mapping = self.schedule.mapping
        factors = sum(self._lanes(loops_used(o.accesses)) for o in mapping.operands[index])
        on_tensor_cores = mapping.graph[index].dtype != "float32"
        products = elements * WARP_SIZE / _MMA_PRODUCTS if on_tensor_cores else elements
        self.instructions += products
        # Factors are written to shared memory and read from it, a full access at a time.
        access = 2 * self.coefficients.access
        self.instructions += access * factors / self.threads / _FACTORS_PER_ACCESS
        if on_tensor_cores:
            self.shared_bytes = max(self.shared_bytes, _FACTOR_BYTES * factors)
        self.barriers += 2
        self.phases += 1

    def _add_reduction(self, index: int, elements: float) -> None:
        """A reduction, or a dot with an axis of 1: a sum of products."""
        mapping = self.schedule.mapping
        is_dot = mapping.graph[index].kind == "dot"
        self.instructions += elements * (2 if is_dot else 1)
        result = self._lanes(mapping.loops[index])
        reduced = self._lanes(mapping.reduced_loops[index])
        vector = self._contiguous_per_thread(index) if is_dot else self.threads
        layout = thread_layout(result, reduced, self.num_warps, min(vector, _FACTORS_PER_ACCESS))
        crosses_warps = layout.warps_per_row > 1
        shuffles = SHUFFLE_INSTRUCTIONS * math.log2(layout.lanes_per_row)
        row = shuffles + self.coefficients.cross_warp * crosses_warps
        self.instructions += row * layout.rows_per_thread
        self.barriers += 2 * crosses_warps
        self.phases += 1

    def _contiguous_per_thread(self, index: int) -> int:
        """Contiguous elements of a thread in a sum of products.

        Seen with Triton 3.6: a vector in memory gets the layout of the matrix if it has fewer
        elements than there are threads; otherwise the matrix gets the layout of the vector.
        """
        mapping = self.schedule.mapping
        lanes = [
            self._lanes(loops_used(operand.accesses))
            for operand in mapping.operands[index]
            if mapping.is_in_memory(operand)
        ]
        vector = min(lanes, default=0)
        return self.threads if vector < self.threads else vector // self.threads

    def _warps_with_distinct_rows(self) -> int:
        """Warps that do not repeat the work of others; tensor cores limit them by rows."""
        mapping, rows = self.schedule.mapping, 0
        for index in mapping.operators:
            node = mapping.graph[index]
            if node.kind == "dot" and node.dtype != "float32":
                axes = dot_loops(mapping, index)
                rows = max(rows, self._lanes(axes[0]) if all(axes) else 0)
        return min(self.num_warps, max(1, rows // _MMA_ROWS)) if rows else self.num_warps

    def access_count(self, in_memory: Iterable[Operand]) -> float:
        """Loads of these operands and stores of the outputs, for each thread."""
        mapping = self.schedule.mapping
        tensors = [(operand.source, loops_used(operand.accesses)) for operand in in_memory]
        tensors += [(index, mapping.loops[index]) for index in mapping.outputs]
        accesses = 0.0
        for node, loops in tensors:
            vector = ACCESS_BYTES // DTYPE_BYTES[mapping.graph[node].dtype]
            accesses += max(1.0, self._lanes(loops) / self.threads / vector)
        return accesses

    def _lanes(self, loops: frozenset[int]) -> int:
        """Lanes of a tensor that varies along these loops."""
        groups = find_groups(loops, self.schedule.loop_groups)
        return math.prod(self.lane_counts[group] for group in groups)
