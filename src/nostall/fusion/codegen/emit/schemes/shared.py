"""Emission of kernels that keep rows in shared memory: the scheme ``shared``, written in Gluon.

Triton cannot name shared memory; Gluon can. A program has one row and runs the passes of
``looped``. Values that several passes use are loaded or computed once and stay in shared memory
(:mod:`~nostall.fusion.codegen.tiling.on_chip`). All buffers lie in one arena; buffers with disjoint
live ranges share memory (:mod:`~nostall.fusion.codegen.tiling.shared_memory`).

With ``async_copies`` a whole row is copied by ``cp.async`` before the first pass over it. More
bytes are then in flight than registers could hold.

If rows are peeled (:mod:`~nostall.fusion.codegen.tiling.loop_peeling`), buffers are indexed by lane
and include the padding lanes beside the row, which are neither reduced nor stored.

Why there are no data races:

- One pass writes a chunk of a buffer and later passes read it, both in the same layout, so each
  thread reads what it wrote itself.
- Within a pass, a chunk is read before it is written.
- A barrier between passes separates the last read of a dead buffer from the first write of the
  buffer that reuses its memory.

Triton adds barriers of its own where accesses to one allocation may overlap.

Index-set splitting for one-hot conditions: a condition ``column == label`` is true in at most one
iteration of a loop over the columns of a row. All other iterations run a copy of the body in which
the condition is the constant false, so the compiler removes the operators that depend on it (the
one-hot vector in the gradient of cross-entropy, for example). All threads of a program must take
the same branch, so this applies to programs of one row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from nostall.fusion.codegen.emit.gluon import GLUON, GLUON_WITH_COPIES, LAYOUT
from nostall.fusion.codegen.emit.one_hot import is_one_hot
from nostall.fusion.codegen.emit.program import Launch, Program, assemble_program, kernel_name
from nostall.fusion.codegen.emit.schemes.multi_pass import write_row_operators
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.emit.tile_parts import (
    Chunk,
    TileValue,
    row_limit,
    specializes_counts,
    write_row_block,
)
from nostall.fusion.codegen.expressions.index_width import narrow_to_int32
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.reductions import Reduction
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES, Value, compute_dtype
from nostall.fusion.codegen.loops.reduction_levels import Pass, ValueKey
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import Peeling
from nostall.fusion.codegen.tiling.on_chip import (
    OnChipValues,
    rematerialization_options,
    storage_dtype,
)
from nostall.fusion.codegen.tiling.planned_kernel import KernelFacts, PlannedKernel
from nostall.fusion.codegen.tiling.shared_memory import SharingRule, any_dead_buffer
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.operations import DTYPE_BYTES


def emit_shared(kernel: PlannedKernel, may_reuse: SharingRule = any_dead_buffer) -> Program:
    """The program of the scheme ``shared``; ``may_reuse``: which memory buffers may share."""
    schedule, plan = kernel.schedule, kernel.plan
    options = rematerialization_options(schedule, plan.async_copies, plan.peeled)
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        _SharedRowWriter(options[plan.rematerialized], kernel, may_reuse, lines).write()
    launch = Launch(
        kernel_name(kernel),
        tuple(f"p{i}" for i in (*schedule.mapping.inputs, *schedule.mapping.outputs)),
        (schedule.outer_row_count,),
        (Extent(schedule.row_count, 1), 1),
        plan.num_warps,
        specializes_counts(schedule),
        aligned=plan.async_copies,
    )
    language = GLUON_WITH_COPIES if plan.async_copies else GLUON
    return assemble_program(kernel, [(lines, launch)], language=language)


class _SharedRowWriter:
    """Writes the body of a kernel: all passes over one row."""

    def __init__(
        self, on_chip: OnChipValues, kernel: PlannedKernel, may_reuse: SharingRule, lines: Lines
    ) -> None:
        plan = kernel.plan
        self.on_chip = on_chip
        self.schedule = on_chip.schedule
        self.lines = lines
        self.width = plan.chunks[0]
        self.arena = on_chip.arena(self.width, may_reuse)
        self._write_declarations(plan)
        rows = write_row_block(kernel, lines, "pid")
        peeling = kernel.peeling
        if peeling:
            peeling.write_row_bounds(lines, self.schedule.column_count, row_limit(self.schedule))
        mask = "inside" if peeling or self.schedule.column_count % self.width else None
        start = "(first - ahead)" if peeling else f"at * {self.width}"
        self.chunk = Chunk(self.width, "c", mask, "", peeling, start, "lanes")
        self.tile = Tile(kernel.facts, self.schedule.columns, rows, (self.chunk,), lines)
        self.tile.materialized |= {
            value for value in on_chip.passes_using if isinstance(value, int)
        }
        self.accumulators = {
            index: accumulator(kernel.facts, index)
            for part in on_chip.passes
            for index in part.reductions
        }
        # Values that are in shared memory, with their names in the pass that made them. Loads from
        # shared memory assign the same names.
        self.tile_values: dict[ValueKey, TileValue] = {}

    def write(self) -> None:
        """Write all passes."""
        for number, part in enumerate(self.on_chip.passes):
            self.lines(f"# pass {number}")
            write_row_operators(self.tile, part)
            if part.has_columns:
                if number:
                    self.lines("barrier()")
                self._write_column_pass(part)

    def _write_column_pass(self, part: Pass) -> None:
        """Write the copies, the loops and the reduction results of a pass over the columns."""
        copied = [
            value
            for value in part.operands
            if self._is_stored_by(part, value) and self.on_chip.is_prefetched(value)
        ]
        if copied:
            self._copy_rows(copied)
        self._write_loops(part, copied)
        for index in part.reductions:
            reduction = self.accumulators[index]
            text = reduction.reduce(f"a{index}", 1)
            self.tile.write_reduction_result(index, reduction, text, has_rows=True)

    def _write_declarations(self, plan: KernelPlan) -> None:
        """Declare the register layout of chunks, and a view of the arena for each dtype in it."""
        lines, width = self.lines, self.width
        thread = f"[1, {self.on_chip.vector_elements}]"
        layout = f"{thread}, [1, {WARP_SIZE}], [1, {plan.num_warps}], [1, 0]"
        lines(f"{LAYOUT}: gl.constexpr = gl.BlockedLayout({layout})")
        lines("flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])")
        lines(f"lanes = gl.arange(0, {width}, layout=gl.SliceLayout(0, {LAYOUT}))[None, :]")
        bytes_per_lane = self.arena.total_bytes // width
        lines(f"arena = gl.allocate_shared_memory(gl.uint8, [{bytes_per_lane}, 1, {width}], flat)")
        dtypes = {storage_dtype(self.schedule, value) for value in self.on_chip.passes_using}
        for dtype in sorted(dtypes):
            shape = f"[{bytes_per_lane // DTYPE_BYTES[dtype]}, 1, {width}]"
            lines(f"as_{dtype} = seen_as(arena, gl.{dtype}, {shape}, flat)")

    def _is_stored_by(self, part: Pass, value: ValueKey) -> bool:
        """Whether a pass puts a value into shared memory."""
        return value in self.on_chip.passes_using and value not in part.on_chip

    def _copy_rows(self, values: Sequence[ValueKey]) -> None:
        """Copy whole rows from global to shared memory, all chunks in one group of copies."""
        lines, tile, peeling = self.lines, self.tile, self.chunk.peeling
        with lines.block(f"for at in range(0, {self.arena.chunks}):"):
            self._write_indices(self.chunk)
            for value in values:
                assert not isinstance(value, int)
                address, mask, has_rows, has_columns = tile.load_address(value, self.chunk)
                dtype = compute_dtype(tile.graph[value.source].dtype)
                name = tile.value_name(value, "")
                self.tile_values[value] = TileValue(Value(name, dtype), has_rows, has_columns)
                mask_argument = f", mask={mask}" if mask else ""
                if peeling:
                    peeling.write_async_copy(lines, self._buffer_chunk(value), f"p{value.source}")
                else:
                    lines(f"copy_ahead({self._buffer_chunk(value)}, {address}{mask_argument})")
        lines("async_copy.commit_group()")
        lines("async_copy.wait_group(0)")
        if peeling:
            self._load_tail(peeling, values)
        lines("barrier()")

    def _load_tail(self, peeling: Peeling, values: Sequence[ValueKey]) -> None:
        """Load the elements that copies of 16 bytes leave out, and merge them into the buffers.

        Each thread rewrites only the lanes that it copied itself.
        """
        lines = self.lines
        with lines.block(peeling.tail_condition(self.schedule.column_count)):
            lines(f"at = whole // {self.width}")
            self._write_indices(self.chunk)
            for value in values:
                assert not isinstance(value, int)
                buffer = self._buffer_chunk(value)
                copied, tail = f"{buffer}.load({LAYOUT})", peeling.tail_load(f"p{value.source}")
                lines(f"{buffer}.store(tl.where(lane < whole, {copied}, {tail}))")

    def _write_indices(self, chunk: Chunk) -> None:
        """Write the column indices of chunk number ``at``."""
        lines, columns = self.lines, self.schedule.column_count
        if chunk.peeling:
            lines(f"first = at * {self.width}")
            chunk.peeling.write_lane_indices(lines, columns, chunk.lanes)
            return
        lines(f"{chunk.counter} = {chunk.start} + {chunk.lanes}")
        if chunk.mask:
            lines(f"{chunk.mask} = c < {columns}")

    def _write_loops(self, part: Pass, copied: Collection[ValueKey]) -> None:
        """Write the loops of a pass over the chunks of a row.

        ``copied``: operands that asynchronous copies have put into shared memory for this pass.
        """
        lines = self.lines
        for index in part.reductions:
            reduction = self.accumulators[index]
            fill = f"{reduction.neutral}, {TRITON_DTYPES[reduction.dtype]}"
            lines(f"a{index} = gl.full((1, {self.width}), {fill}, {LAYOUT})")
        one_hot = one_hot_columns(self.tile, part.column_operators)
        write_column_scalars(self.tile, one_hot)
        for head, chunk_number, chunk in self._loops():
            # Names that are first used in a loop do not exist after it.
            with lines.block(head):
                if chunk_number:
                    lines(chunk_number)
                self._write_indices(chunk)
                self._write_chunk(self.tile.with_chunk(chunk), part, copied, one_hot)

    def _loops(self) -> list[tuple[str, str, Chunk]]:
        """The loops over a row: the head, a line that computes ``at`` (empty: the loop counts it),
        and the chunk of an iteration.

        Loops over full chunks have no masks. If rows are peeled, the first chunk and the chunks at
        the end may be cut, depending on where the row begins. Both ends share one loop: if their
        chunk numbers were constants, their masks would stay in registers from the first pass to the
        last, a quarter of all registers.
        """
        chunks, chunk = self.arena.chunks, self.chunk
        full_chunks = self.schedule.column_count // self.width
        if not chunk.peeling:
            full = replace(chunk, mask=None)
            loops = [(f"for at in range(0, {full_chunks}):", "", full)] if full_chunks else []
            remainder = (f"for at in range({full_chunks}, {chunks}):", "", chunk)
            return [*loops, remainder] if chunk.mask else loops
        end = max(1, full_chunks)
        full = replace(chunk, mask=None, peeling=replace(chunk.peeling, is_interior=True))
        both_ends = f"for end in range(0, {chunks - end + 1}):", f"at = (end + {end}) % {chunks}"
        interior = [(f"for at in range(1, {end}):", "", full)] if end > 1 else []
        return [(*both_ends, chunk), *interior]

    def _write_chunk(
        self, tile: Tile, part: Pass, copied: Collection[ValueKey], one_hot: Collection[int]
    ) -> None:
        """Write one chunk: loads from shared memory, operators, stores to shared memory."""
        lines, (chunk,) = self.lines, tile.chunks
        for value in part.operands:
            if value in part.on_chip or value in copied:
                self._load(tile, value)
        if chunk.mask or not one_hot:
            self._write_operators(tile, part, copied)
            return
        false = f"tl.full((1, {self.width}), 0, tl.int1, {LAYOUT})"
        with lines.block(f"if {chunk_condition(tuple(one_hot), chunk.start, self.width)}:"):
            self._write_operators(tile.with_chunk(chunk), part, copied)
        with lines.block("else:"):
            without_column = tile.with_false_conditions(dict.fromkeys(one_hot, false))
            self._write_operators(without_column, part, copied)

    def _write_operators(self, tile: Tile, part: Pass, copied: Collection[ValueKey]) -> None:
        """Write the operators, accumulations and new buffers of a chunk."""
        lines, (chunk,) = self.lines, tile.chunks
        tile.write(part.column_operators, part.column_outputs)
        for index in part.reductions:
            lines(f"# {tile.graph.describe(index)}")
            lines(f"a{index} = {tile.accumulate(index, self.accumulators[index], chunk)}")
        for value in (*part.operands, *part.column_operators):
            if self._is_stored_by(part, value) and value not in copied:
                self._store(tile, value)

    def _load(self, tile: Tile, value: ValueKey) -> None:
        """Load a chunk of a value from its buffer."""
        entry = self.tile_values[value]
        dtype = storage_dtype(self.schedule, value)
        text = f"{self._buffer_chunk(value)}.load({LAYOUT})"
        if entry.value.dtype == "bool":
            text = f"{text} != 0"
        elif entry.value.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[entry.value.dtype]})"
        self.lines(f"{entry.value.text} = {text}")
        tile.values[value, ""] = entry

    def _store(self, tile: Tile, value: ValueKey) -> None:
        """Store a chunk of a value in its buffer."""
        entry = self.tile_values[value] = tile.values[value, ""]
        dtype, text = storage_dtype(self.schedule, value), entry.value.text
        if entry.value.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        self.lines(f"{self._buffer_chunk(value)}.store({text})")

    def _buffer_chunk(self, value: ValueKey) -> str:
        """Chunk number ``at`` of the buffer of a value, as a Gluon expression."""
        number = list(self.on_chip.passes_using).index(value)
        chunk_bytes = self.width * self.arena.buffers[number].element_bytes
        first = self.arena.offsets[number] // chunk_bytes
        index = f"{first} + at" if first else "at"
        return f"as_{storage_dtype(self.schedule, value)}.index({index})"


def accumulator(facts: KernelFacts, index: int) -> Reduction:
    """The reduction, with the dtype in which a loop over columns accumulates it.

    Maxima and minima of fp16 tensors are accumulated in fp16. This is exact because the result is
    one of the values, and faster because hardware compares two fp16 values in one instruction. The
    hardware also does so with bf16, but Triton 3.6 compares bf16 in fp32.
    """
    mapping, graph, reduction = (
        facts.schedule.mapping,
        facts.schedule.mapping.graph,
        facts.reductions[index],
    )
    if graph[index].op not in ("amax", "amin"):
        return reduction
    (operand,) = mapping.operands[index]
    while operand.source in mapping.operands and graph[operand.source].op == "cast":
        if graph[operand.source].dtype != "float32":
            return reduction
        (operand,) = mapping.operands[operand.source]
    is_fp16 = mapping.is_in_memory(operand) and graph[operand.source].dtype == "float16"
    return replace(reduction, dtype="float16") if is_fp16 else reduction


def one_hot_columns(tile: Tile, indices: Iterable[int]) -> dict[int, str]:
    """The one-hot conditions among operators, each with the int32 text of its column number.

    Conditions that another loop or kernel reads are left out.
    """
    numbers = {
        index: _column_number(tile, index)
        for index in indices
        if index not in tile.materialized and is_one_hot(tile.schedule, index)
    }
    return {index: number for index, number in numbers.items() if number}


def _column_number(tile: Tile, index: int) -> str:
    """The column number that a one-hot condition compares with, as int32.

    Empty if the counter is not the column number, if the number does not fit into int32, or if all
    rows have the same number.
    """
    graph, operands = tile.graph, tile.mapping.operands[index]
    (counter,) = [o for o in operands if graph[o.source].op == "iota"]
    (other,) = [o for o in operands if o is not counter]
    (chunk,) = tile.chunks
    if tile.operand_value(counter, chunk).int32_text != f"({chunk.counter})":
        return ""
    value = tile.operand_value(other, None).value
    return narrow_to_int32(value, is_row_value=True) if value.number is None else ""


def write_column_scalars(tile: Tile, numbers: dict[int, str]) -> None:
    """Write the column numbers of a row as scalars ``s{index}``, on which threads can branch."""
    for index, number in numbers.items():
        tile.lines(f"s{index} = tl.sum(tl.sum({number}, 1), 0)")


def chunk_condition(conditions: Sequence[int], start: str, width: int) -> str:
    """A condition that is true if a chunk from column ``start`` has one of the columns."""
    ranges = (f"(s{index} >= {start}) & (s{index} < {start} + {width})" for index in conditions)
    return " or ".join(ranges)
