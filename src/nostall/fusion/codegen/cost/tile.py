"""What one tile takes of a warp, *modelled* from its operators: instructions, registers, barriers.

Nothing is compiled.  The figures were counted in code that Triton and ptxas made for sm_90.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nostall.fusion.codegen.cost.thread_layout import ACCESS_BYTES, Spread, spread
from nostall.fusion.codegen.expressions.one_plus import is_left_to_readers
from nostall.fusion.codegen.expressions.quantize import is_left_to_casts
from nostall.fusion.codegen.expressions.softmax import SHARE, SHARED_OUT, template
from nostall.fusion.codegen.loops.mapping import Operand, used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.graph.operations import COMPARISONS, DTYPE_BYTES

_INSTRUCTIONS: Mapping[str, float] = {
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
_CASTS = {"float32": 0.0, "float16": 1.5, "bfloat16": 1.5}
"""Of a cast to these; 2 to others."""
_AHEAD = 32
"""Elements of a thread whose loads are under way together: ptxas unrolls loops up to that."""
_64_BITS = 4.0
"""More, of an operator that reads integers of 64 bits: places are made such, and two words each
are compared."""
_DIVIDED_BY_ROW = 2.0
"""Of a division by a value of the row, whose reciprocal is made once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Instructions of a warp beside those of the operators, and registers of a thread.

    ``chunk``: addresses of a chunk of columns, ``step`` of one more equal chunk or turn of a loop
    over columns (assumed: a binary does not say how often it turns).  Registers are ``fixed`` ones,
    some for each ``further`` chunk that is not equal, and for each element so many, more for each
    tensor with ``rows`` that is read and each without (``bare``), for a counter of random
    numbers that is ``drawn``, for ``places`` of 64 bits, and where rows are ``walked`` over with
    sums that stay (their next loads are under way); ``peeled`` ones more where rows begin anywhere,
    ``staged`` ones where several loops copy ahead, whatever the tile.  ``live``: share of the
    values of small dots that are live at once.

    Fitted to what Triton 3.6 compiled for sm_90, by ``python -m benchmarks run fusion.cost_model_fit``.
    In ``benchmarks/fusion/results/cost_model.json.gz``, measured later, half of 544 kernels without
    loops are within 14 % (instructions), and half of 1,201 that do not spill (registers).  None of
    those has ``places``, which is from earlier ones.
    """

    program: float = 0.48
    chunk: float = 20.8
    step: float = 0.47
    access: float = 5.1
    across_warps: float = 18.9
    converted: float = 1.7
    fixed: float = 15.3
    further: float = 5.7
    each: float = 0.63
    rows: float = 0.39
    bare: float = 0.34
    drawn: float = 3.6
    places: float = 2.8
    walked: float = 3.0
    peeled: float = 21.8
    staged: float = 14.4
    live: float = 0.53
    operators: Mapping[str, float] = field(default_factory=lambda: _INSTRUCTIONS)


COUNTS = Counts()


@dataclass(frozen=True, slots=True)
class TileCost:
    """``instructions`` of a warp, ``registers`` and ``elements`` of a thread, the fewest
    ``accesses`` that reach as many; ``converted``: bytes of shared memory through which tensors are
    laid out anew."""

    instructions: float
    registers: float
    elements: float
    accesses: float
    converted: int
    barriers: int


@dataclass(frozen=True, slots=True)
class _Access:
    """A tensor that a tile reads or writes: ``size`` of an element in bytes, and how many of them
    one access takes at most."""

    size: int
    widest: int
    has_rows: bool
    written: bool


def waiting(turns: int, elements: float) -> float:
    """Loads of a loop that wait for others, with so many ``elements`` of a thread in a turn."""
    return math.ceil(turns / max(1.0, min(4.0, _AHEAD / elements)))


def tile_cost(
    of: Schedule,
    plan: KernelPlan,
    chunks: Sequence[int],
    operators: Collection[int],
    outputs: Collection[int],
    counts: Counts = COUNTS,
    *,
    held: int = 0,
    turned: bool = False,
    walked: bool = False,
) -> TileCost:
    """Of a tile of these chunks: operators, loads of what they read, stores of ``outputs``.

    ``turned``: one turn of a loop over columns.  ``held``: tiles that stay over all turns."""
    flat = plan.scheme == "thread"
    rows = 1 if flat else plan.rows
    along_rows = not flat and of.along_rows
    anywhere = along_rows or plan.peeled
    block = rows if rows > 1 and plan.scheme != "column" else 0
    memory = _accesses(of, flat, block, anywhere, operators, outputs)
    # Triton lays tensors of one shape out alike, as the one with the most neighbours wants it.
    alike = [one.widest for one in memory if one.has_rows or rows == 1]
    bare = [one.widest for one in memory if not (one.has_rows or rows == 1)]
    widest = max(alike, default=4)
    spreads = [spread(rows, width, plan.num_warps, widest, along_rows) for width in chunks]
    instructions = elements = moved = 0.0
    barriers = 0
    reductions = sum(bool(of.mapping.reduced.get(index)) for index in operators)
    even = len(set(chunks)) == 1
    for at, (width, lies) in enumerate(zip(chunks, spreads, strict=True)):
        elements += lies.elements
        again = turned or (even and at > 0)
        instructions += counts.step if again else counts.chunk
        instructions += _computing(of, flat, along_rows, operators, lies, counts)
        # Equal chunks are put together before warps meet.
        meet = lies.warps > 1 and not (even and at > 0)
        crossing = reductions * meet
        instructions += counts.across_warps * lies.rows * crossing
        barriers += 2 * crossing
        for one in memory:
            each = lies.elements / (1 if one.has_rows else lies.rows)
            instructions += counts.access * max(1.0, each / min(lies.vector, one.widest))
            if one.written and lies.vector * one.size > ACCESS_BYTES:
                moved += each * one.size / 4
                barriers += 2
        if bare and _place(spread(1, width, plan.num_warps, max(bare))) != _place(lies):
            # Along rows what has none goes to where the tile lies; else the tile goes there and
            # back, around the operators that read it.
            moved += lies.elements / lies.rows if along_rows else 2 * lies.elements
            barriers += 2 if along_rows else 4
    if len({_place(lies) for lies in spreads}) > 1:
        # Sums of chunks meet only in one layout; what comes after some of them comes from there.
        times = max(1, max(of.level.values(), default=0) - 1)
        moved += times * max(lies.elements for lies in spreads)
        barriers += 2 * times
    converted = min(_SCRATCH, 4 * rows * max(chunks)) if moved else 0
    instructions += counts.converted * moved
    # Within one warp, lanes exchange what they have.
    barriers = barriers if plan.num_warps > 1 else 0
    each_draws = _counters(of, flat or along_rows, operators, spreads[0])
    registers = _registers(memory, counts, each_draws) + held
    of_elements = (index for index in operators if flat or of.is_wide(index))
    registers += counts.places * any(_of_64_bits(of, index) for index in of_elements)
    registers += counts.walked * walked
    further = 0 if even else len(chunks) - 1
    registers = counts.fixed + counts.further * further + elements * registers
    registers += counts.peeled * plan.peeled
    registers += counts.staged * (plan.ahead and plan.scheme == "looped")
    accesses = sum(max(1.0, lies.elements / lies.vector) for lies in spreads)
    return TileCost(instructions, registers, elements, accesses, converted, barriers)


_SCRATCH = 32768
"""Bytes through which Triton converts at once; seen in sm_90 code."""


def _registers(memory: Sequence[_Access], counts: Counts, drawn: float) -> float:
    """Registers for each element of a thread, which draws so many counters."""
    read = [one for one in memory if not one.written]
    rows = sum(one.has_rows for one in read)
    vectors = counts.rows * rows + counts.bare * (len(read) - rows)
    return counts.each + vectors + counts.drawn * drawn


def _computing(
    of: Schedule,
    flat: bool,
    along_rows: bool,
    operators: Iterable[int],
    lies: Spread,
    counts: Counts,
) -> float:
    """Instructions of the operators, and of a thread's own part of reductions."""
    counted = 0.0
    for index in operators:
        if of.mapping.reduced.get(index):
            counted += lies.elements
        elif flat or of.is_wide(index):
            has_rows = flat or of.mapping.loops[index] & set(of.rows)
            alike = 1 if has_rows else lies.rows
            if of.mapping.graph[index].op == "random":
                alike *= _of_one_counter(of, index, lies, flat or along_rows)
            counted += cost_of(of, index, flat, counts.operators) * lies.elements / alike
    return counted


def _counters(of: Schedule, along_rows: bool, operators: Iterable[int], lies: Spread) -> float:
    """Counters that an element draws at once, for the tensor that needs the most."""
    random = [index for index in operators if of.mapping.graph[index].op == "random"]
    return max((1 / _of_one_counter(of, index, lies, along_rows) for index in random), default=0.0)


def _of_one_counter(of: Schedule, index: int, lies: Spread, along_rows: bool) -> int:
    """Neighbours of a thread whose random numbers come from one counter."""
    words = of.mapping.graph[index]["words"]
    assert isinstance(words, int)
    fastest = (of.rows if along_rows else of.columns)[-1]
    row = [loop for place in of.mapping.places[index] for loop in place.loops]
    return math.gcd(words, lies.vector) if row and row[-1] == fastest else 1


def cost_of(of: Schedule, index: int, flat: bool, known: Mapping[str, float]) -> float:
    """Instructions of an operator for each element."""
    graph = of.mapping.graph
    node = graph[index]
    if node.op == "random":
        return known["random"]
    if is_left_to_readers(graph, index) or is_left_to_casts(graph, index, of.mapping.outputs):
        return 0.0
    for source in graph.sources[index] if node.op == "add" else ():
        if is_left_to_readers(graph, source):
            return known[f"1 + {graph[source].op}"]
    if (shorter := template(graph, index)) in (SHARE, SHARED_OUT):
        return known["share"] if shorter == SHARE else 1.0
    if node.op == "cast":
        return _CASTS.get(node.dtype, 2.0)
    if node.op == "div" and not flat and not of.reads_columns(of.mapping.operands[index][-1]):
        return _DIVIDED_BY_ROW
    return known.get(node.op, 1.0) + _64_BITS * _of_64_bits(of, index)


def _of_64_bits(of: Schedule, index: int) -> bool:
    """Whether an operator computes with integers of 64 bits; seeds are none, and counters are
    compared with what a row has in 32."""
    graph, operands = of.mapping.graph, of.mapping.operands[index]
    if graph[index].op == "random":
        return False
    longs = [operand for operand in operands if graph[operand.source].dtype == "int64"]
    if graph[index].op in COMPARISONS:
        others = [one for one in longs if graph[one.source].op != "iota"]
        if len(others) < len(longs) and not any(of.reads_columns(one) for one in others):
            return False
    return bool(longs)


def _accesses(
    of: Schedule,
    flat: bool,
    block: int,
    anywhere: bool,
    operators: Iterable[int],
    outputs: Collection[int],
) -> list[_Access]:
    """What is read and written column by column, each place once.  ``block``: rows of a tile that
    begins at a multiple of them.  ``anywhere``: where rows begin does not decide how wide accesses
    are."""
    mapping, graph = of.mapping, of.mapping.graph
    touched: dict[int | Operand, tuple[int, frozenset[int]]] = {}
    for index in operators:
        for operand in mapping.operands[index]:
            if mapping.is_outside(operand):
                touched[operand] = (operand.source, used(operand.places))
        if index in outputs:
            touched[index] = (index, mapping.loops[index])
    found = []
    columns = set(of.rows if flat else of.columns)
    for value, (node, loops) in touched.items():
        if not loops & columns:
            continue
        has_rows = not flat and bool(loops & set(of.rows))
        if block and value not in outputs and of.is_of_block(loops, block):
            has_rows = False
        size = DTYPE_BYTES[graph[node].dtype]
        # Rows begin where the one before ends; what has none begins where memory does.
        row = of.column_count * size if has_rows and not anywhere else ACCESS_BYTES
        widest = max(1, math.gcd(ACCESS_BYTES, row) // size)
        found.append(_Access(size, widest, flat or has_rows, value in outputs))
    return found


def _place(lies: Spread) -> tuple[int, int, int]:
    """What has to be the same for two tensors to meet without shared memory."""
    return lies.vector, lies.lanes, lies.warps
