"""What one tile takes of a warp, *modelled* from its operators: instructions, registers, barriers.

Nothing is compiled.  The figures were counted in code that Triton and ptxas made for sm_90.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nostall.fusion.codegen.cost.thread_layout import ACCESS_BYTES, ThreadLayout, thread_layout
from nostall.fusion.codegen.expressions.one_plus import is_deferred
from nostall.fusion.codegen.expressions.quantize import is_deferred_round
from nostall.fusion.codegen.expressions.softmax import EXP, NORMALIZE, softmax_template
from nostall.fusion.codegen.loops.mapping import Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.graph.operations import COMPARISONS, DTYPE_BYTES

_OPERATOR_INSTRUCTIONS: Mapping[str, float] = {
    "copy": 0,
    "exp": 5,
    "exp2": 2,
    "sqrt": 15,
    "reciprocal": 8,
    "div": 8,
    "sigmoid": 4,
    "tanh": 11,
    "1 + tanh": 4,
    "1 + erf": 11,
    "share": 2,
    "sign": 4,
    "log": 25,
    "log2": 27,
    "expm1": 25,
    "log1p": 29,
    "erf": 17,
    "sin": 40,
    "cos": 40,
    "random": 52,
    "fmod": 68,
    "remainder": 70,
    "pow": 96,
}
"""Of an operator for each element in fp32; 1 for all others.  Counted in kernels of one operator;
``sin`` and ``cos`` without the path for large numbers, ``random`` of one counter: elements whose
words are those of one counter share it.  ``share`` is the exp of a softmax."""
_CAST_INSTRUCTIONS = {"float32": 0.0, "float16": 1.5, "bfloat16": 1.5}
"""Of a cast to these; 2 to others."""
_MAX_UNROLLED_ELEMENTS = 32
"""Elements of a thread whose loads are under way together: ptxas unrolls loops up to that."""
_INT64_INSTRUCTIONS = 4.0
"""More, of an operator that reads integers of 64 bits: places are made such, and two words each
are compared."""
_ROW_DIVISION_INSTRUCTIONS = 2.0
"""Of a division by a value of the row, whose reciprocal is made once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCoefficients:
    """Instructions of a warp beside those of the operators, and registers of a thread.

    ``chunk``: addresses of a chunk of columns, ``iteration`` of one more equal chunk or turn of a loop
    over columns (assumed: a binary does not say how often it turns).  Registers are ``base_registers`` ones,
    some for each ``extra_chunk_registers`` chunk that is not equal, and for each element so many, more for each
    tensor with ``row_operand_registers`` that is read and each without (``broadcast_operand_registers``), for a counter of random
    numbers that is ``philox_registers``, for ``int64_registers`` of 64 bits, and where rows are ``row_loop_registers`` over with
    sums that stay (their next loads are under way); ``peeling_registers`` ones more where rows begin anywhere,
    ``async_copy_registers`` ones where several loops copy ahead, whatever the tile.  ``live_share``: share of the
    values of small dots that are live at once.

    Fitted to what Triton 3.6 compiled for sm_90, by ``python -m benchmarks run fusion.cost_model_fit``.
    In ``benchmarks/fusion/results/cost_model.json.gz``, measured later, half of 544 kernels without
    loops are within 14 % (instructions), and half of 1,201 that do not spill (registers).  None of
    those has ``int64_registers``, which is from earlier ones.
    """

    program: float = 0.48
    chunk: float = 20.8
    iteration: float = 0.47
    access: float = 5.1
    cross_warp: float = 18.9
    layout_conversion: float = 1.7
    base_registers: float = 15.3
    extra_chunk_registers: float = 5.7
    element_registers: float = 0.63
    row_operand_registers: float = 0.39
    broadcast_operand_registers: float = 0.34
    philox_registers: float = 3.6
    int64_registers: float = 2.8
    row_loop_registers: float = 3.0
    peeling_registers: float = 21.8
    async_copy_registers: float = 14.4
    live_share: float = 0.53
    operators: Mapping[str, float] = field(default_factory=lambda: _OPERATOR_INSTRUCTIONS)


COEFFICIENTS = CostCoefficients()


@dataclass(frozen=True, slots=True)
class TileCost:
    """``instructions`` of a warp, ``registers`` and ``elements`` of a thread, the fewest
    ``accesses`` that reach as many; ``layout_conversion``: bytes of shared memory through which tensors are
    laid out anew."""

    instructions: float
    registers: float
    elements: float
    accesses: float
    conversion_bytes: int
    barriers: int


@dataclass(frozen=True, slots=True)
class _Access:
    """A tensor that a tile reads or writes: ``element_bytes`` of an element in bytes, and how many of them
    one access takes at most."""

    element_bytes: int
    max_vector: int
    has_rows: bool
    is_written: bool


def dependent_loads(turns: int, elements: float) -> float:
    """Loads of a loop that wait for others, with so many ``elements`` of a thread in a turn."""
    return math.ceil(turns / max(1.0, min(4.0, _MAX_UNROLLED_ELEMENTS / elements)))


def tile_cost(
    schedule: Schedule,
    plan: KernelPlan,
    chunks: Sequence[int],
    operators: Collection[int],
    outputs: Collection[int],
    counts: CostCoefficients = COEFFICIENTS,
    *,
    held: int = 0,
    turned: bool = False,
    walked: bool = False,
) -> TileCost:
    """Of a tile of these chunks: operators, loads of what they read, stores of ``outputs``.

    ``turned``: one turn of a loop over columns.  ``held``: tiles that stay over all turns."""
    flat = plan.scheme == "thread"
    rows = 1 if flat else plan.rows
    along_rows = not flat and schedule.is_column_major
    anywhere = along_rows or plan.peeled
    block = rows if rows > 1 and plan.scheme != "column" else 0
    memory = _tensor_accesses(schedule, flat, block, anywhere, operators, outputs)
    # Triton lays tensors of one shape out alike, as the one with the most neighbours wants it.
    alike = [one.max_vector for one in memory if one.has_rows or rows == 1]
    bare = [one.max_vector for one in memory if not (one.has_rows or rows == 1)]
    widest = max(alike, default=4)
    spreads = [thread_layout(rows, width, plan.num_warps, widest, along_rows) for width in chunks]
    instructions = elements = moved = 0.0
    barriers = 0
    reductions = sum(bool(schedule.mapping.reduced_loops.get(index)) for index in operators)
    even = len(set(chunks)) == 1
    for at, (width, lies) in enumerate(zip(chunks, spreads, strict=True)):
        elements += lies.elements_per_thread
        again = turned or (even and at > 0)
        instructions += counts.iteration if again else counts.chunk
        instructions += _operator_instructions(schedule, flat, along_rows, operators, lies, counts)
        # Equal chunks are put together before warps meet.
        meet = lies.warps_per_row > 1 and not (even and at > 0)
        crossing = reductions * meet
        instructions += counts.cross_warp * lies.rows_per_thread * crossing
        barriers += 2 * crossing
        for one in memory:
            each = lies.elements_per_thread / (1 if one.has_rows else lies.rows_per_thread)
            instructions += counts.access * max(1.0, each / min(lies.vector, one.max_vector))
            if one.is_written and lies.vector * one.element_bytes > ACCESS_BYTES:
                moved += each * one.element_bytes / 4
                barriers += 2
        if bare and _layout_key(thread_layout(1, width, plan.num_warps, max(bare))) != _layout_key(
            lies
        ):
            # Along rows what has none goes to where the tile lies; else the tile goes there and
            # back, around the operators that read it.
            moved += (
                lies.elements_per_thread / lies.rows_per_thread
                if along_rows
                else 2 * lies.elements_per_thread
            )
            barriers += 2 if along_rows else 4
    if len({_layout_key(lies) for lies in spreads}) > 1:
        # Sums of chunks meet only in one layout; what comes after some of them comes from there.
        times = max(1, max(schedule.reduction_level.values(), default=0) - 1)
        moved += times * max(lies.elements_per_thread for lies in spreads)
        barriers += 2 * times
    converted = min(_CONVERSION_SCRATCH_BYTES, 4 * rows * max(chunks)) if moved else 0
    instructions += counts.layout_conversion * moved
    # Within one warp, lanes exchange what they have.
    barriers = barriers if plan.num_warps > 1 else 0
    each_draws = _philox_counters_per_element(schedule, flat or along_rows, operators, spreads[0])
    registers = _registers_per_element(memory, counts, each_draws) + held
    of_elements = (index for index in operators if flat or schedule.has_columns(index))
    registers += counts.int64_registers * any(_uses_int64(schedule, index) for index in of_elements)
    registers += counts.row_loop_registers * walked
    further = 0 if even else len(chunks) - 1
    registers = (
        counts.base_registers + counts.extra_chunk_registers * further + elements * registers
    )
    registers += counts.peeling_registers * plan.peeled
    registers += counts.async_copy_registers * (plan.async_copies and plan.scheme == "looped")
    accesses = sum(max(1.0, lies.elements_per_thread / lies.vector) for lies in spreads)
    return TileCost(instructions, registers, elements, accesses, converted, barriers)


_CONVERSION_SCRATCH_BYTES = 32768
"""Bytes through which Triton converts at once; seen in sm_90 code."""


def _registers_per_element(
    memory: Sequence[_Access], counts: CostCoefficients, drawn: float
) -> float:
    """Registers for each element of a thread, which draws so many counters."""
    read = [one for one in memory if not one.is_written]
    rows = sum(one.has_rows for one in read)
    vectors = counts.row_operand_registers * rows + counts.broadcast_operand_registers * (
        len(read) - rows
    )
    return counts.element_registers + vectors + counts.philox_registers * drawn


def _operator_instructions(
    schedule: Schedule,
    flat: bool,
    along_rows: bool,
    operators: Iterable[int],
    lies: ThreadLayout,
    counts: CostCoefficients,
) -> float:
    """Instructions of the operators, and of a thread's own part of reductions."""
    counted = 0.0
    for index in operators:
        if schedule.mapping.reduced_loops.get(index):
            counted += lies.elements_per_thread
        elif flat or schedule.has_columns(index):
            has_rows = flat or schedule.mapping.loops[index] & set(schedule.rows)
            alike = 1 if has_rows else lies.rows_per_thread
            if schedule.mapping.graph[index].op == "random":
                alike *= _elements_per_philox_counter(schedule, index, lies, flat or along_rows)
            counted += (
                operator_cost(schedule, index, flat, counts.operators)
                * lies.elements_per_thread
                / alike
            )
    return counted


def _philox_counters_per_element(
    schedule: Schedule, along_rows: bool, operators: Iterable[int], lies: ThreadLayout
) -> float:
    """Counters that an element draws at once, for the tensor that needs the most."""
    random = [index for index in operators if schedule.mapping.graph[index].op == "random"]
    return max(
        (1 / _elements_per_philox_counter(schedule, index, lies, along_rows) for index in random),
        default=0.0,
    )


def _elements_per_philox_counter(
    schedule: Schedule, index: int, lies: ThreadLayout, along_rows: bool
) -> int:
    """Neighbours of a thread whose random numbers come from one counter."""
    words = schedule.mapping.graph[index]["words"]
    assert isinstance(words, int)
    fastest = (schedule.rows if along_rows else schedule.columns)[-1]
    row = [loop for place in schedule.mapping.accesses[index] for loop in place.loops]
    return math.gcd(words, lies.vector) if row and row[-1] == fastest else 1


def operator_cost(schedule: Schedule, index: int, flat: bool, known: Mapping[str, float]) -> float:
    """Instructions of an operator for each element."""
    graph = schedule.mapping.graph
    node = graph[index]
    if node.op == "random":
        return known["random"]
    if is_deferred(graph, index) or is_deferred_round(graph, index, schedule.mapping.outputs):
        return 0.0
    for source in graph.sources[index] if node.op == "add" else ():
        if is_deferred(graph, source):
            return known[f"1 + {graph[source].op}"]
    if (shorter := softmax_template(graph, index)) in (EXP, NORMALIZE):
        return known["share"] if shorter == EXP else 1.0
    if node.op == "cast":
        return _CAST_INSTRUCTIONS.get(node.dtype, 2.0)
    if (
        node.op == "div"
        and not flat
        and not schedule.operand_has_columns(schedule.mapping.operands[index][-1])
    ):
        return _ROW_DIVISION_INSTRUCTIONS
    return known.get(node.op, 1.0) + _INT64_INSTRUCTIONS * _uses_int64(schedule, index)


def _uses_int64(schedule: Schedule, index: int) -> bool:
    """Whether an operator computes with integers of 64 bits; seeds are none, and counters are
    compared with what a row has in 32."""
    graph, operands = schedule.mapping.graph, schedule.mapping.operands[index]
    if graph[index].op == "random":
        return False
    longs = [operand for operand in operands if graph[operand.source].dtype == "int64"]
    if graph[index].op in COMPARISONS:
        others = [one for one in longs if graph[one.source].op != "iota"]
        if len(others) < len(longs) and not any(
            schedule.operand_has_columns(one) for one in others
        ):
            return False
    return bool(longs)


def _tensor_accesses(
    schedule: Schedule,
    flat: bool,
    block: int,
    anywhere: bool,
    operators: Iterable[int],
    outputs: Collection[int],
) -> list[_Access]:
    """What is read and written column by column, each place once.  ``block``: rows of a tile that
    begins at a multiple of them.  ``anywhere``: where rows begin does not decide how wide accesses
    are."""
    mapping, graph = schedule.mapping, schedule.mapping.graph
    touched: dict[int | Operand, tuple[int, frozenset[int]]] = {}
    for index in operators:
        for operand in mapping.operands[index]:
            if mapping.is_in_memory(operand):
                touched[operand] = (operand.source, loops_used(operand.accesses))
        if index in outputs:
            touched[index] = (index, mapping.loops[index])
    found = []
    columns = set(schedule.rows if flat else schedule.columns)
    for value, (node, loops) in touched.items():
        if not loops & columns:
            continue
        has_rows = not flat and bool(loops & set(schedule.rows))
        if block and value not in outputs and schedule.is_block_uniform(loops, block):
            has_rows = False
        size = DTYPE_BYTES[graph[node].dtype]
        # Rows begin where the one before ends; what has none begins where memory does.
        row = schedule.column_count * size if has_rows and not anywhere else ACCESS_BYTES
        widest = max(1, math.gcd(ACCESS_BYTES, row) // size)
        found.append(_Access(size, widest, flat or has_rows, value in outputs))
    return found


def _layout_key(lies: ThreadLayout) -> tuple[int, int, int]:
    """What has to be the same for two tensors to meet without shared memory."""
    return lies.vector, lies.lanes_per_row, lies.warps_per_row
