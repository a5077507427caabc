"""Rows that are kept in shared memory: the *shared* template, written in Gluon.

A program has one row.  Its passes are those of ``looped``, but what several of them need is read or
computed once and kept on chip (:mod:`nostall.fusion.codegen.tiling.on_chip`), in one arena in which buffers
that do not live together share memory (:mod:`nostall.fusion.codegen.tiling.shared_memory`).  Ordinary Triton
cannot say this: it has no name for shared memory.

With ``ahead`` what is read from memory is copied by ``cp.async``, a whole row before the first pass
over it; memory then has more on its way than registers could hold.

Of ``find_peeling`` rows (:mod:`nostall.fusion.codegen.tiling.loop_peeling`) what is kept lies by lane, that of the
lanes beside the row with it: nothing takes these in or writes them to memory.

Why it is right: every chunk of every buffer is written by one pass before a later one reads it, in
the layout in which it is read, so each thread reads what it wrote itself; inside of a pass chunks
are read first and written last; between passes stands a barrier, so whoever overwrites the place of
a dead buffer does so after its last reader.  Triton adds barriers of its own where accesses to one
allocation may meet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from nostall.fusion.codegen.emit.fp16_minmax import accumulator
from nostall.fusion.codegen.emit.gluon import GLUON, GLUON_WITH_COPIES, LAYOUT
from nostall.fusion.codegen.emit.index_splitting import (
    chunk_condition,
    one_hot_columns,
    write_column_scalars,
)
from nostall.fusion.codegen.emit.multi_pass import write_row_operators
from nostall.fusion.codegen.emit.program import Launch, Program, assemble_program, kernel_name
from nostall.fusion.codegen.emit.prologue import row_limit, specializes_counts, write_row_block
from nostall.fusion.codegen.emit.tile import Chunk, Tile, TileValue
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES, compute_dtype
from nostall.fusion.codegen.expressions.templates import Value as Named
from nostall.fusion.codegen.loops.reduction_levels import Pass, ValueKey
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import Peeling, find_peeling
from nostall.fusion.codegen.tiling.on_chip import (
    OnChipValues,
    rematerialization_options,
    storage_dtype,
)
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.shared_memory import Reuse
from nostall.fusion.codegen.tiling.tile_sizes import WARP_SIZE
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.operations import DTYPE_BYTES


def emit_shared(kernel: PlannedKernel, reuse: Reuse = "order") -> Program:
    """The program of the scheme ``shared``; other values of ``reuse`` serve for comparisons."""
    schedule, plan = kernel.schedule, kernel.plan
    kept = rematerialization_options(schedule, plan.async_copies, plan.peeled)[plan.rematerialized]
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        _SharedRowWriter(kept, kernel, reuse, lines).write()
    tensors = tuple(f"p{i}" for i in (*schedule.mapping.inputs, *schedule.mapping.outputs))
    grid = (Extent(schedule.row_count, 1), 1)
    told = (
        kernel_name(kernel),
        tensors,
        (schedule.outer_row_count,),
        grid,
        plan.num_warps,
    )
    launch = Launch(*told, specializes_counts(schedule), aligned=plan.async_copies)
    language = GLUON_WITH_COPIES if plan.async_copies else GLUON
    return assemble_program(kernel, [(lines, launch)], language=language)


class _SharedRowWriter:
    """Writes the passes over one row."""

    def __init__(
        self, kept: OnChipValues, kernel: PlannedKernel, reuse: Reuse, lines: Lines
    ) -> None:
        plan = kernel.plan
        self.on_chip = kept
        self.schedule = kept.schedule
        self.lines = lines
        self.width = plan.chunks[0]
        self.arena = kept.arena(self.width, reuse)
        self._declare(plan)
        rows = write_row_block(kernel, lines, "pid")
        lies = find_peeling(self.schedule) if plan.peeled else None
        if lies:
            lies.write_row_bounds(lines, self.schedule.column_count, row_limit(self.schedule))
        mask = "inside" if lies or self.schedule.column_count % self.width else None
        first = "(first - ahead)" if lies else f"at * {self.width}"
        self.chunk = Chunk(self.width, "c", mask, "", lies, first, "lanes")
        self.tile = Tile(self.schedule, self.schedule.columns, rows, (self.chunk,), lines)
        self.tile.materialized |= {value for value in kept.passes_using if isinstance(value, int)}
        # What values were called where they were made, and so are when they are read again.
        self.tile_values: dict[ValueKey, TileValue] = {}

    def write(self) -> None:
        for number, part in enumerate(self.on_chip.passes):
            self.lines(f"# pass {number}")
            write_row_operators(self.tile, part)
            if part.has_columns:
                if number:
                    self.lines("barrier()")
                early = [
                    v
                    for v in part.operands
                    if self._is_new(part, v) and self.on_chip.is_prefetched(v)
                ]
                if early:
                    self._copy_rows(early)
                self._write_loops(part, early)
                for index in part.reductions:
                    how = accumulator(self.schedule, index)
                    self.tile.write_reduced(index, how, how.reduce(f"a{index}", 1), rows=True)

    def _declare(self, plan: KernelPlan) -> None:
        """The layout of chunks in registers, and the arena seen in every dtype that it holds."""
        lines, width = self.lines, self.width
        each = (
            f"[1, {self.on_chip.vector_elements}], [1, {WARP_SIZE}], [1, {plan.num_warps}], [1, 0]"
        )
        lines(f"{LAYOUT}: gl.constexpr = gl.BlockedLayout({each})")
        lines("flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])")
        lines(f"lanes = gl.arange(0, {width}, layout=gl.SliceLayout(0, {LAYOUT}))[None, :]")
        held = self.arena.total_bytes // width
        lines(f"arena = gl.allocate_shared_memory(gl.uint8, [{held}, 1, {width}], flat)")
        for dtype in sorted(
            {storage_dtype(self.schedule, value) for value in self.on_chip.passes_using}
        ):
            shape = f"[{held // DTYPE_BYTES[dtype]}, 1, {width}]"
            lines(f"as_{dtype} = seen_as(arena, gl.{dtype}, {shape}, flat)")

    def _is_new(self, part: Pass, value: ValueKey) -> bool:
        """Whether a pass is the one that leaves a value."""
        return value in self.on_chip.passes_using and value not in part.on_chip

    def _copy_rows(self, values: Sequence[ValueKey]) -> None:
        """Whole rows from memory to shared memory, all chunks on their way at once."""
        lines, tile, lies = self.lines, self.tile, self.chunk.peeling
        with lines.block(f"for at in range(0, {self.arena.chunks}):"):
            self._write_indices(self.chunk)
            for value in values:
                assert not isinstance(value, int)
                address, mask, rows, columns = tile.load_address(value, self.chunk)
                dtype = compute_dtype(tile.graph[value.source].dtype)
                self.tile_values[value] = TileValue(
                    Named(tile.value_name(value, ""), dtype), rows, columns
                )
                masked = f", mask={mask}" if mask else ""
                if lies:
                    lies.write_async_copy(lines, self._buffer_chunk(value), f"p{value.source}")
                else:
                    lines(f"copy_ahead({self._buffer_chunk(value)}, {address}{masked})")
        lines("async_copy.commit_group()")
        lines("async_copy.wait_group(0)")
        if lies:
            self._load_tail(lies, values)
        lines("barrier()")

    def _load_tail(self, lies: Peeling, values: Sequence[ValueKey]) -> None:
        """What copies of 16 bytes have left out, by way of registers: each thread puts it beside
        what it has copied itself."""
        lines = self.lines
        with lines.block(lies.tail_condition(self.schedule.column_count)):
            lines(f"at = whole // {self.width}")
            self._write_indices(self.chunk)
            for value in values:
                assert not isinstance(value, int)
                place = self._buffer_chunk(value)
                copied, beyond = f"{place}.load({LAYOUT})", lies.tail_load(f"p{value.source}")
                lines(f"{place}.store(tl.where(lane < whole, {copied}, {beyond}))")

    def _write_indices(self, chunk: Chunk) -> None:
        """The columns of the chunk ``at``."""
        lines, columns = self.lines, self.schedule.column_count
        if chunk.peeling:
            lines(f"first = at * {self.width}")
            chunk.peeling.write_lane_indices(lines, columns, chunk.lanes)
            return
        lines(f"{chunk.counter} = {chunk.first} + {chunk.lanes}")
        if chunk.mask:
            lines(f"{chunk.mask} = c < {columns}")

    def _write_loops(self, part: Pass, early: Collection[ValueKey]) -> None:
        """Loops over the chunks of a row that reduce what the pass does."""
        lines = self.lines
        for index in part.reductions:
            how = accumulator(self.schedule, index)
            filled = f"(1, {self.width}), {how.neutral}, {TRITON_DTYPES[how.dtype]}, {LAYOUT}"
            lines(f"a{index} = gl.full({filled})")
        marks = one_hot_columns(self.tile, part.column_operators)
        write_column_scalars(self.tile, marks)
        for head, at, some in self._loop_heads():
            # Names that are first used in a loop do not exist after it.
            with lines.block(head):
                if at:
                    lines(at)
                self._write_indices(some)
                self._write_chunk(self.tile.with_chunk(some), part, early, marks)

    def _loop_heads(self) -> list[tuple[str, str, Chunk]]:
        """The heads of loops, what chunk they are ``at`` where they do not count that, and lanes.

        Those that all columns fill have no masks.  Of peeled rows these are all but the first and
        what is behind as many columns as fill chunks, wherever the row begins; the ends share a
        loop: were their places constants, their masks would stay in registers from the first pass
        to the last, a quarter of all.
        """
        chunks, chunk = self.arena.chunks, self.chunk
        rest = self.schedule.column_count // self.width
        if not chunk.peeling:
            whole = replace(chunk, mask=None)
            found = [(f"for at in range(0, {rest}):", "", whole)] if rest else []
            behind = (f"for at in range({rest}, {chunks}):", "", chunk)
            return [*found, behind] if chunk.mask else found
        rest = max(1, rest)
        whole = replace(chunk, mask=None, peeling=replace(chunk.peeling, is_interior=True))
        ends = f"for end in range(0, {chunks - rest + 1}):", f"at = (end + {rest}) % {chunks}"
        between = [(f"for at in range(1, {rest}):", "", whole)] if rest > 1 else []
        return [(*ends, chunk), *between]

    def _write_chunk(
        self, tile: Tile, part: Pass, early: Collection[ValueKey], marks: Collection[int]
    ) -> None:
        """One chunk: reads what is kept, works, keeps what is new."""
        lines, (chunk,) = self.lines, tile.chunks
        for value in part.operands:
            if value in part.on_chip or value in early:
                self._load(tile, value)
        if chunk.mask or not marks:
            self._write_operators(tile, part, early)
            return
        nowhere = f"tl.full((1, {self.width}), 0, tl.int1, {LAYOUT})"
        with lines.block(f"if {chunk_condition(tuple(marks), chunk.first, self.width)}:"):
            self._write_operators(tile.with_chunk(chunk), part, early)
        with lines.block("else:"):
            self._write_operators(
                tile.with_false_conditions(dict.fromkeys(marks, nowhere)), part, early
            )

    def _write_operators(self, tile: Tile, part: Pass, early: Collection[ValueKey]) -> None:
        lines, (chunk,) = self.lines, tile.chunks
        tile.write(part.column_operators, part.column_outputs)
        for index in part.reductions:
            lines(f"# {tile.graph.describe(index)}")
            lines(f"a{index} = {tile.accumulate(index, accumulator(self.schedule, index), chunk)}")
        for value in (*part.operands, *part.column_operators):
            if self._is_new(part, value) and value not in early:
                self._store(tile, value)

    def _load(self, tile: Tile, value: ValueKey) -> None:
        entry = self.tile_values[value]
        dtype, text = (
            storage_dtype(self.schedule, value),
            f"{self._buffer_chunk(value)}.load({LAYOUT})",
        )
        if entry.value.dtype == "bool":
            text = f"{text} != 0"
        elif entry.value.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[entry.value.dtype]})"
        self.lines(f"{entry.value.text} = {text}")
        tile.values[value, ""] = entry

    def _store(self, tile: Tile, value: ValueKey) -> None:
        entry = self.tile_values[value] = tile.values[value, ""]
        dtype, text = storage_dtype(self.schedule, value), entry.value.text
        if entry.value.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        self.lines(f"{self._buffer_chunk(value)}.store({text})")

    def _buffer_chunk(self, value: ValueKey) -> str:
        """The chunk ``at`` of the buffer of a value."""
        name = list(self.on_chip.passes_using).index(value)
        chunk = self.width * self.arena.buffers[name].element_bytes
        first = self.arena.offsets[name] // chunk
        index = f"{first} + at" if first else "at"
        return f"as_{storage_dtype(self.schedule, value)}.index({index})"
