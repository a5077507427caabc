"""Modelled cost of the kernels of a plan, scheme by scheme. Nothing is compiled.

Kernels that loop over tiles of a sequence (``turned``): each loop iteration is a small tile; the
loads of a few iterations are in flight at once, as in other loops. No kernel of this kind was among
those that the coefficients were fitted to.

Kernels with small batched dots (``matrix``): a program has one element of the batch. Its tensors
are spread over all threads, with one or two long axes each. Factors of a dot, and reductions across
warps, go through shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

from nostall.fusion.codegen.cost.coefficients import COEFFICIENTS, CostCoefficients, operator_cost
from nostall.fusion.codegen.cost.gpu import (
    PARTIAL_RESULT_BYTES,
    KernelCost,
    tensor_bytes,
    with_sector_waste,
)
from nostall.fusion.codegen.cost.multi_pass import (
    COMBINE_INSTRUCTIONS,
    async_copy_instructions,
    looped_cost,
    shared_cost,
    split_costs,
    tile_copy_bytes,
)
from nostall.fusion.codegen.cost.tile import (
    ACCESS_BYTES,
    TileCost,
    TileWork,
    dependent_loads,
    thread_layout,
    tile_cost,
)
from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import pipelined_load_waits
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, Scheme
from nostall.fusion.codegen.tiling.legality import BASE_REGISTERS
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE, finish_tile, group_lanes
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


_RESCALE_INSTRUCTIONS = 1.0
"""More instructions for each element of a sum that follows a running maximum."""
_BASE_REGISTERS, _REGISTERS_PER_ELEMENT = 26.0, 0.7
"""Registers of a thread, and for each element of a tile, besides accumulators. Of 23 kernels of a
query that Triton 3.6 compiled for sm_90, all are within 25 % of that and 14 within 10 %."""


def sequence_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost of the only kernel of the scheme ``turned``."""
    schedule, plan = kernel.schedule, kernel.plan
    mapping, graph = schedule.mapping, schedule.mapping.graph
    model = _SequenceModel(kernel, coefficients)
    for index in mapping.operators:
        model.add(index)
    loop_accesses, other_accesses = model.access_counts()
    iteration = model.loop_instructions + coefficients.access * loop_accesses
    moved = sum(graph[index].bytes for index in (*mapping.inputs, *mapping.outputs))
    elements, tiling = plan.elements_per_thread, kernel.sequence_tiling
    return KernelCost(
        programs=schedule.row_count,
        warps=plan.num_warps,
        instructions=model.other_instructions
        + model.iterations * iteration
        + coefficients.access * other_accesses,
        registers=_BASE_REGISTERS + model.accumulators + _REGISTERS_PER_ELEMENT * elements,
        memory_bytes=moved / schedule.row_count,
        iterations=model.iterations,
        dependent_loads=dependent_loads(model.iterations, elements),
        reduction_phases=len(tiling.softmax_sums) + bool(tiling.accumulated),
        barriers=model.barriers if plan.num_warps > 1 else 0,
    )


class _SequenceModel:
    """Adds up the cost of the operators inside and outside of the loop."""

    def __init__(self, kernel: PlannedKernel, coefficients: CostCoefficients) -> None:
        self.schedule, self.tiling = kernel.schedule, kernel.sequence_tiling
        self.coefficients, self.num_warps = coefficients, kernel.plan.num_warps
        self.threads = WARP_SIZE * self.num_warps
        group, positions = self.tiling.group, kernel.positions_per_tile
        length = self.schedule.count(self.schedule.loop_groups[group])
        self.iterations = -(-length // positions)
        self.lane_counts = tuple(
            positions if at == group else lanes
            for at, lanes in enumerate(group_lanes(self.schedule))
        )
        self.loop_instructions = coefficients.iteration
        self.other_instructions = coefficients.program
        self.accumulators = 0.0
        self.barriers = 0

    def add(self, index: int) -> None:
        mapping, tiling = self.schedule.mapping, self.tiling
        reduced = mapping.reduced_loops.get(index, frozenset())
        elements = max(1.0, self._lanes(mapping.loops[index] | reduced) / self.threads)
        is_dot = mapping.graph[index].kind == "dot"
        if index in tiling.accumulated:
            self.accumulators += elements
            rescaling = _RESCALE_INSTRUCTIONS * (index in tiling.scaled_by)
            self.loop_instructions += elements * (1 + is_dot + rescaling)
            exchange, crosses_warps = self._exchange_cost(index)
            self.other_instructions += elements + exchange
            self.barriers += 2 * crosses_warps
        elif reduced:
            exchange, crosses_warps = self._exchange_cost(index)
            self._add_instructions(index, elements * (2 if is_dot else 1) + exchange)
            times = self.iterations if index in tiling.in_loop else 1
            self.barriers += 2 * crosses_warps * times
        elif index not in tiling.pass_through:
            cost = operator_cost(self.schedule, index, False, self.coefficients.operators)
            self._add_instructions(index, cost * elements)

    def _add_instructions(self, index: int, instructions: float) -> None:
        if index in self.tiling.in_loop:
            self.loop_instructions += instructions
        else:
            self.other_instructions += instructions

    def _exchange_cost(self, index: int) -> tuple[float, bool]:
        """Instructions that reduce values across lanes, and whether warps exchange values, too."""
        mapping = self.schedule.mapping
        result = self._lanes(mapping.loops[index])
        reduced = self._lanes(mapping.reduced_loops[index])
        vector = ACCESS_BYTES // DTYPE_BYTES["float16"]
        if index in self.tiling.accumulated:
            # The positions are spread over the lanes and warps that the other axis leaves.
            layout = thread_layout(reduced, result, self.num_warps, vector)
            lanes, rows = WARP_SIZE // layout.lanes_per_row, layout.vector
            crosses_warps = self.num_warps > 1
        else:
            layout = thread_layout(result, reduced, self.num_warps, vector)
            lanes, rows = layout.lanes_per_row, layout.rows_per_thread
            crosses_warps = layout.warps_per_row > 1
        shuffles = SHUFFLE_INSTRUCTIONS * math.log2(max(1, lanes))
        return (shuffles + self.coefficients.cross_warp * crosses_warps) * rows, crosses_warps

    def access_counts(self) -> tuple[float, float]:
        """Loads and stores of a thread: in one loop iteration, and outside of the loop."""
        mapping = self.schedule.mapping
        positions = set(self.schedule.loop_groups[self.tiling.group])
        tensors = [(o.source, loops_used(o.accesses)) for o in mapping.memory_operands]
        tensors += [(index, mapping.loops[index]) for index in mapping.outputs]
        counts = {True: 0.0, False: 0.0}
        for node, loops in tensors:
            vector = ACCESS_BYTES // DTYPE_BYTES[mapping.graph[node].dtype]
            accesses = max(1.0, self._lanes(loops) / self.threads / vector)
            counts[bool(loops & positions)] += accesses
        return counts[True], counts[False]

    def _lanes(self, loops: frozenset[int]) -> int:
        """Lanes of a tensor that varies along these loops."""
        groups = find_groups(loops, self.schedule.loop_groups)
        return math.prod(self.lane_counts[group] for group in groups)


def two_stage_costs(
    kernel: PlannedKernel, coefficients: CostCoefficients
) -> tuple[KernelCost, KernelCost]:
    """The costs of the first kernel, which loops over rows, and of the second one."""
    return _first_stage_cost(kernel, coefficients), _second_stage_cost(kernel)


def _first_stage_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """Each program loops over a group of rows."""
    schedule, plan = kernel.schedule, kernel.plan
    reduced_rows = schedule.count(schedule.reduced_rows)
    iterations = -(-reduced_rows // (plan.rows * plan.splits))
    programs = schedule.row_count // reduced_rows * plan.splits
    outputs = [index for index in schedule.body if index in schedule.mapping.outputs]
    plan_key = schedule, plan.rows, plan.chunks, plan.num_warps
    is_default = coefficients is COEFFICIENTS
    tile = _default_tile(*plan_key) if is_default else _first_stage_tile(*plan_key, coefficients)
    moved = tensor_bytes(schedule, schedule.mapping.inputs, outputs)
    moved += PARTIAL_RESULT_BYTES * plan.splits * _result_count(schedule)
    copying = async_copy_instructions(kernel, tile, coefficients)
    cost = KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=coefficients.program + iterations * (tile.instructions + copying),
        registers=tile.registers,
        memory_bytes=moved / programs,
        iterations=iterations,
        dependent_loads=1 if plan.async_copies else iterations,
        overlapped_loads=pipelined_load_waits(iterations) if plan.async_copies else 0.0,
        # The loads of the next iteration do not wait for the reductions of this one.
        reduction_phases=max(schedule.reduction_level.values(), default=0),
        barriers=iterations * (tile.barriers + plan.async_copies),
        shared_bytes=tile.conversion_bytes + tile_copy_bytes(kernel),
    )
    return with_sector_waste(kernel, cost)


def _first_stage_tile(
    schedule: Schedule,
    rows: int,
    chunks: tuple[int, ...],
    warps: int,
    coefficients: CostCoefficients,
) -> TileCost:
    """The cost of an iteration, which is the same for plans that differ in other respects."""
    outputs = [index for index in schedule.body if index in schedule.mapping.outputs]
    operators = (*schedule.body, *schedule.row_reductions)
    work = TileWork(operators, outputs, len(schedule.row_reductions), "rows")
    kernel = PlannedKernel(schedule, KernelPlan("column", rows, chunks, warps))
    return tile_cost(kernel, chunks, work, coefficients)


@lru_cache(maxsize=256)
def _default_tile(schedule: Schedule, rows: int, chunks: tuple[int, ...], warps: int) -> TileCost:
    return _first_stage_tile(schedule, rows, chunks, warps, COEFFICIENTS)


def _second_stage_cost(kernel: PlannedKernel) -> KernelCost:
    """Partial results are reduced."""
    results, splits = _result_count(kernel.schedule), kernel.plan.splits
    width, warps = finish_tile(splits, results)
    programs = max(1, -(-results // width))
    elements = width * splits / (WARP_SIZE * warps)
    return KernelCost(
        programs=programs,
        warps=warps,
        instructions=COMBINE_INSTRUCTIONS + 2 * elements,
        registers=COEFFICIENTS.base_registers + elements,
        memory_bytes=PARTIAL_RESULT_BYTES * splits * results / programs,
        reduction_phases=1.0,
        barriers=2,
    )


def _result_count(schedule: Schedule) -> int:
    """Elements of all reductions over rows."""
    return sum(schedule.mapping.graph[index].elements for index in schedule.row_reductions)


CostFunction = Callable[[PlannedKernel, CostCoefficients], tuple[KernelCost, ...]]


def kernel_costs(
    kernel: PlannedKernel, coefficients: CostCoefficients = COEFFICIENTS
) -> tuple[KernelCost, ...]:
    """The modelled costs of all launches of a kernel, in their order."""
    return COSTS[kernel.plan.scheme](kernel, coefficients)


def _flat_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost without reductions; a program has one chunk of elements."""
    return _register_cost(kernel, coefficients, kernel.plan.chunks[0])


def _row_cost(kernel: PlannedKernel, coefficients: CostCoefficients) -> KernelCost:
    """The cost with whole rows in registers."""
    cost = _register_cost(kernel, coefficients, kernel.plan.rows)
    return with_sector_waste(kernel, cost)


def _register_cost(
    kernel: PlannedKernel, coefficients: CostCoefficients, rows_per_program: int
) -> KernelCost:
    schedule, plan = kernel.schedule, kernel.plan
    mapping = schedule.mapping
    programs = -(-schedule.row_count // rows_per_program)
    tile = tile_cost(kernel, plan.chunks, TileWork(schedule.body, mapping.outputs), coefficients)
    return KernelCost(
        programs=programs,
        warps=plan.num_warps,
        instructions=coefficients.program + tile.instructions,
        registers=tile.registers,
        memory_bytes=tensor_bytes(schedule, mapping.inputs, mapping.outputs) / programs,
        reduction_phases=max(schedule.reduction_level.values(), default=0),
        barriers=tile.barriers,
        shared_bytes=tile.conversion_bytes,
    )


def _single(
    cost: Callable[[PlannedKernel, CostCoefficients], KernelCost],
) -> CostFunction:
    """The cost function of a scheme with one launch."""
    return lambda kernel, coefficients: (cost(kernel, coefficients),)


COSTS: Mapping[Scheme, CostFunction] = {
    "thread": _single(_flat_cost),
    "warp": _single(_row_cost),
    "block": _single(_row_cost),
    "looped": _single(looped_cost),
    "shared": _single(shared_cost),
    "split": split_costs,
    "column": two_stage_costs,
    "matrix": _single(dot_cost),
    "turned": _single(sequence_cost),
}
"""The cost function of each scheme."""
