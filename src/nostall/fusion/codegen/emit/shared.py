"""Rows that are kept in shared memory: the *shared* template, written in Gluon.

A program has one row.  Its passes are those of ``looped``, but what several of them need is read or
computed once and kept on chip (:mod:`nostall.fusion.codegen.tiling.on_chip`), in one arena in which buffers
that do not live together share memory (:mod:`nostall.fusion.codegen.tiling.shared_memory`).  Ordinary Triton
cannot say this: it has no name for shared memory.

With ``ahead`` what is read from memory is copied by ``cp.async``, a whole row before the first pass
over it; memory then has more on its way than registers could hold.

Of ``peeled`` rows (:mod:`nostall.fusion.codegen.tiling.loop_peeling`) what is kept lies by lane, that of the
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

from nostall.fusion.codegen.emit.fp16_minmax import running
from nostall.fusion.codegen.emit.gluon import GLUON, GLUON_WITH_COPIES, LAYOUT
from nostall.fusion.codegen.emit.index_splitting import is_near, marked, write_places
from nostall.fusion.codegen.emit.multi_pass import write_narrow
from nostall.fusion.codegen.emit.program import Launch, Program, base_name, program
from nostall.fusion.codegen.emit.prologue import is_specialised, limit, row_block
from nostall.fusion.codegen.emit.tile import Chunk, Entry, Tile
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import TRITON_DTYPES, computed
from nostall.fusion.codegen.expressions.templates import Value as Named
from nostall.fusion.codegen.loops.reduction_levels import Pass, Value
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import WARP, KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import Peeled, peeled
from nostall.fusion.codegen.tiling.on_chip import Kept, demotions, storage
from nostall.fusion.codegen.tiling.shared_memory import Reuse
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.operations import DTYPE_BYTES


def emit_shared(of: Schedule, plan: KernelPlan, reuse: Reuse = "order") -> Program:
    """The kernel of a plan of the scheme ``shared``; ``reuse`` other than the default is there to
    be compared with it."""
    kept = demotions(of, plan.ahead, plan.peeled)[plan.demoted]
    lines = Lines()
    with lines.block():
        lines("pid = tl.program_id(0)")
        _Row(kept, plan, reuse, lines).write()
    tensors = tuple(f"p{i}" for i in (*of.mapping.inputs, *of.mapping.outputs))
    grid = (Extent(of.row_count, 1), 1)
    told = base_name(of.mapping, plan), tensors, (of.counted,), grid, plan.num_warps
    launch = Launch(*told, is_specialised(of), aligned=plan.ahead)
    language = GLUON_WITH_COPIES if plan.ahead else GLUON
    return program(of.mapping, plan, [(lines, launch)], language=language)


class _Row:
    """Writes the passes over one row."""

    def __init__(self, kept: Kept, plan: KernelPlan, reuse: Reuse, lines: Lines) -> None:
        self.kept = kept
        self.of = kept.of
        self.lines = lines
        self.width = plan.chunks[0]
        self.arena = kept.arena(self.width, reuse)
        self._declare(plan)
        rows = row_block(self.of, plan, lines, "pid")
        lies = peeled(self.of) if plan.peeled else None
        if lies:
            lies.write_row(lines, self.of.column_count, limit(self.of))
        mask = "inside" if lies or self.of.column_count % self.width else None
        first = "(first - ahead)" if lies else f"at * {self.width}"
        self.chunk = Chunk(self.width, "c", mask, "", lies, first, "lanes")
        self.tile = Tile(self.of, self.of.columns, rows, (self.chunk,), lines)
        self.tile.kept |= {value for value in kept.needed if isinstance(value, int)}
        # What values were called where they were made, and so are when they are read again.
        self.named: dict[Value, Entry] = {}

    def write(self) -> None:
        for number, part in enumerate(self.kept.passes):
            self.lines(f"# pass {number}")
            write_narrow(self.tile, part)
            if part.has_columns:
                if number:
                    self.lines("barrier()")
                early = [v for v in part.taken if self._is_new(part, v) and self.kept.is_early(v)]
                if early:
                    self._copy(early)
                self._columns(part, early)
                for index in part.reductions:
                    how = running(self.of, index)
                    self.tile.keep_reduced(index, how, how.along(f"a{index}", 1), rows=True)

    def _declare(self, plan: KernelPlan) -> None:
        """The layout of chunks in registers, and the arena seen in every dtype that it holds."""
        lines, width = self.lines, self.width
        each = f"[1, {self.kept.neighbours}], [1, {WARP}], [1, {plan.num_warps}], [1, 0]"
        lines(f"{LAYOUT}: gl.constexpr = gl.BlockedLayout({each})")
        lines("flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])")
        lines(f"lanes = gl.arange(0, {width}, layout=gl.SliceLayout(0, {LAYOUT}))[None, :]")
        held = self.arena.bytes // width
        lines(f"arena = gl.allocate_shared_memory(gl.uint8, [{held}, 1, {width}], flat)")
        for dtype in sorted({storage(self.of, value) for value in self.kept.needed}):
            shape = f"[{held // DTYPE_BYTES[dtype]}, 1, {width}]"
            lines(f"as_{dtype} = seen_as(arena, gl.{dtype}, {shape}, flat)")

    def _is_new(self, part: Pass, value: Value) -> bool:
        """Whether a pass is the one that leaves a value."""
        return value in self.kept.needed and value not in part.there

    def _copy(self, values: Sequence[Value]) -> None:
        """Whole rows from memory to shared memory, all chunks on their way at once."""
        lines, tile, lies = self.lines, self.tile, self.chunk.peeled
        with lines.block(f"for at in range(0, {self.arena.chunks}):"):
            self._count(self.chunk)
            for value in values:
                assert not isinstance(value, int)
                address, mask, rows, columns = tile.address(value, self.chunk)
                dtype = computed(tile.graph[value.source].dtype)
                self.named[value] = Entry(Named(tile.name(value, ""), dtype), rows, columns)
                masked = f", mask={mask}" if mask else ""
                if lies:
                    lies.copy(lines, self._place(value), f"p{value.source}")
                else:
                    lines(f"copy_ahead({self._place(value)}, {address}{masked})")
        lines("async_copy.commit_group()")
        lines("async_copy.wait_group(0)")
        if lies:
            self._copy_beyond(lies, values)
        lines("barrier()")

    def _copy_beyond(self, lies: Peeled, values: Sequence[Value]) -> None:
        """What copies of 16 bytes have left out, by way of registers: each thread puts it beside
        what it has copied itself."""
        lines = self.lines
        with lines.block(lies.has_beyond(self.of.column_count)):
            lines(f"at = whole // {self.width}")
            self._count(self.chunk)
            for value in values:
                assert not isinstance(value, int)
                place = self._place(value)
                copied, beyond = f"{place}.load({LAYOUT})", lies.beyond(f"p{value.source}")
                lines(f"{place}.store(tl.where(lane < whole, {copied}, {beyond}))")

    def _count(self, chunk: Chunk) -> None:
        """The columns of the chunk ``at``."""
        lines, columns = self.lines, self.of.column_count
        if chunk.peeled:
            lines(f"first = at * {self.width}")
            chunk.peeled.write_lanes(lines, columns, chunk.lanes)
            return
        lines(f"{chunk.counter} = {chunk.first} + {chunk.lanes}")
        if chunk.mask:
            lines(f"{chunk.mask} = c < {columns}")

    def _columns(self, part: Pass, early: Collection[Value]) -> None:
        """Loops over the chunks of a row that reduce what the pass does."""
        lines = self.lines
        for index in part.reductions:
            how = running(self.of, index)
            filled = f"(1, {self.width}), {how.neutral}, {TRITON_DTYPES[how.dtype]}, {LAYOUT}"
            lines(f"a{index} = gl.full({filled})")
        marks = marked(self.tile, part.wide)
        write_places(self.tile, marks)
        for head, at, some in self._loops():
            # Names that are first used in a loop do not exist after it.
            with lines.block(head):
                if at:
                    lines(at)
                self._count(some)
                self._work(self.tile.over(some), part, early, marks)

    def _loops(self) -> list[tuple[str, str, Chunk]]:
        """The heads of loops, what chunk they are ``at`` where they do not count that, and lanes.

        Those that all columns fill have no masks.  Of peeled rows these are all but the first and
        what is behind as many columns as fill chunks, wherever the row begins; the ends share a
        loop: were their places constants, their masks would stay in registers from the first pass
        to the last, a quarter of all.
        """
        chunks, chunk = self.arena.chunks, self.chunk
        rest = self.of.column_count // self.width
        if not chunk.peeled:
            whole = replace(chunk, mask=None)
            found = [(f"for at in range(0, {rest}):", "", whole)] if rest else []
            behind = (f"for at in range({rest}, {chunks}):", "", chunk)
            return [*found, behind] if chunk.mask else found
        rest = max(1, rest)
        whole = replace(chunk, mask=None, peeled=replace(chunk.peeled, is_whole=True))
        ends = f"for end in range(0, {chunks - rest + 1}):", f"at = (end + {rest}) % {chunks}"
        between = [(f"for at in range(1, {rest}):", "", whole)] if rest > 1 else []
        return [(*ends, chunk), *between]

    def _work(
        self, tile: Tile, part: Pass, early: Collection[Value], marks: Collection[int]
    ) -> None:
        """One chunk: reads what is kept, works, keeps what is new."""
        lines, (chunk,) = self.lines, tile.chunks
        for value in part.taken:
            if value in part.there or value in early:
                self._load(tile, value)
        if chunk.mask or not marks:
            self._operate(tile, part, early)
            return
        nowhere = f"tl.full((1, {self.width}), 0, tl.int1, {LAYOUT})"
        with lines.block(f"if {is_near(tuple(marks), chunk.first, self.width)}:"):
            self._operate(tile.over(chunk), part, early)
        with lines.block("else:"):
            self._operate(tile.without(dict.fromkeys(marks, nowhere)), part, early)

    def _operate(self, tile: Tile, part: Pass, early: Collection[Value]) -> None:
        lines, (chunk,) = self.lines, tile.chunks
        tile.write(part.wide, part.wide_outputs)
        for index in part.reductions:
            lines(f"# {tile.graph.describe(index)}")
            lines(f"a{index} = {tile.accumulated(index, running(self.of, index), chunk)}")
        for value in (*part.taken, *part.wide):
            if self._is_new(part, value) and value not in early:
                self._store(tile, value)

    def _load(self, tile: Tile, value: Value) -> None:
        entry = self.named[value]
        dtype, text = storage(self.of, value), f"{self._place(value)}.load({LAYOUT})"
        if entry.value.dtype == "bool":
            text = f"{text} != 0"
        elif entry.value.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[entry.value.dtype]})"
        self.lines(f"{entry.value.text} = {text}")
        tile.entries[value, ""] = entry

    def _store(self, tile: Tile, value: Value) -> None:
        entry = self.named[value] = tile.entries[value, ""]
        dtype, text = storage(self.of, value), entry.value.text
        if entry.value.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        self.lines(f"{self._place(value)}.store({text})")

    def _place(self, value: Value) -> str:
        """The chunk ``at`` of the buffer of a value."""
        name = list(self.kept.needed).index(value)
        chunk = self.width * self.arena.buffers[name].element
        first = self.arena.offsets[name] // chunk
        index = f"{first} + at" if first else "at"
        return f"as_{storage(self.of, value)}.index({index})"
