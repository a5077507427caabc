"""Rows that are kept in shared memory: the *shared* template, written in Gluon.

A program has one row.  Its passes are those of ``looped``, but what several of them need is read or
computed once and kept on chip (:mod:`nostall.fusion.codegen.kept`), in one arena in which buffers
that do not live together share memory (:mod:`nostall.fusion.codegen.buffers`).  Ordinary Triton
cannot say this: it has no name for shared memory.

With ``ahead`` what is read from memory is copied by ``cp.async``, a whole row before the first pass
over it; memory then has more on its way than registers could hold.

Why it is right: every chunk of every buffer is written by one pass before a later one reads it, in
the layout in which it is read, so each thread reads what it wrote itself; inside of a pass chunks
are read first and written last; between passes stands a barrier, so whoever overwrites the place of
a dead buffer does so after its last reader.  Triton adds barriers of its own where accesses to one
allocation may meet.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nostall.fusion.codegen.buffers import Reuse
from nostall.fusion.codegen.frame import is_specialised, row_block
from nostall.fusion.codegen.gluon import GLUON, GLUON_WITH_COPIES, LAYOUT
from nostall.fusion.codegen.kept import Kept, demotions, storage
from nostall.fusion.codegen.levels import Pass, Value
from nostall.fusion.codegen.lines import Lines
from nostall.fusion.codegen.passes import write_narrow
from nostall.fusion.codegen.plan import WARP, KernelPlan
from nostall.fusion.codegen.program import Launch, Program, base_name, program
from nostall.fusion.codegen.schedule import Schedule
from nostall.fusion.codegen.templates import TRITON_DTYPES, computed, reduction
from nostall.fusion.codegen.templates import Value as Named
from nostall.fusion.codegen.tile import Chunk, Entry, Tile
from nostall.fusion.operations import DTYPE_BYTES
from nostall.fusion.varying import Extent

ACCESS_BYTES = 16
"""The most that a thread reads from shared memory at once."""


def emit_shared(of: Schedule, plan: KernelPlan, reuse: Reuse = "order") -> Program:
    """The kernel of a plan of the scheme ``shared``; ``reuse`` other than the default is there to
    be compared with it."""
    kept = demotions(of, plan.ahead)[plan.demoted]
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
        mask = "inside" if self.of.column_count % self.width else None
        first = f"at * {self.width}"
        self.chunk = Chunk(self.width, "c", mask, "", first=first, lanes="lanes")
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
                    how = reduction(self.tile.graph[index])
                    self.tile.keep_reduced(index, how, how.along(f"a{index}", 1), rows=True)

    def _declare(self, plan: KernelPlan) -> None:
        """The layout of chunks in registers, and the arena seen in every dtype that it holds."""
        lines, width = self.lines, self.width
        widest = max(buffer.element for buffer in self.kept.buffers)
        each = f"[1, {ACCESS_BYTES // widest}], [1, {WARP}], [1, {plan.num_warps}], [1, 0]"
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
        lines, tile = self.lines, self.tile
        with lines.block(f"for at in range(0, {self.arena.chunks}):"):
            self._count()
            for value in values:
                assert not isinstance(value, int)
                address, mask, rows, columns = tile.address(value, self.chunk)
                dtype = computed(tile.graph[value.source].dtype)
                self.named[value] = Entry(Named(tile.name(value, ""), dtype), rows, columns)
                masked = f", mask={mask}" if mask else ""
                lines(f"copy_ahead({self._place(value)}, {address}{masked})")
        lines("async_copy.commit_group()")
        lines("async_copy.wait_group(0)")
        lines("barrier()")

    def _count(self) -> None:
        """The columns of the chunk ``at``."""
        self.lines(f"{self.chunk.counter} = {self.chunk.first} + {self.chunk.lanes}")
        if self.chunk.mask:
            self.lines(f"{self.chunk.mask} = c < {self.of.column_count}")

    def _columns(self, part: Pass, early: Collection[Value]) -> None:
        """A loop over the chunks of a row: reads what is kept, works, keeps what is new."""
        lines, tile, graph = self.lines, self.tile, self.tile.graph
        hows = {index: reduction(graph[index]) for index in part.reductions}
        for index, how in hows.items():
            filled = f"(1, {self.width}), {how.neutral}, {TRITON_DTYPES[how.dtype]}, {LAYOUT}"
            lines(f"a{index} = gl.full({filled})")
        outside = dict(tile.entries)
        with lines.block(f"for at in range(0, {self.arena.chunks}):"):
            self._count()
            for value in part.taken:
                if value in part.there or value in early:
                    self._load(value)
            tile.write(part.wide, part.wide_outputs)
            for index, how in hows.items():
                lines(f"# {graph.told(index)}")
                text, _ = tile.partial(index, how, self.chunk)
                lines(f"a{index} = {how.both(f'a{index}', text)}")
            for value in (*part.taken, *part.wide):
                if self._is_new(part, value) and value not in early:
                    self._store(value)
        # Names that are first used in a loop do not exist after it.
        tile.entries = outside

    def _load(self, value: Value) -> None:
        entry = self.named[value]
        dtype, text = storage(self.of, value), f"{self._place(value)}.load({LAYOUT})"
        if entry.value.dtype == "bool":
            text = f"{text} != 0"
        elif entry.value.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[entry.value.dtype]})"
        self.lines(f"{entry.value.text} = {text}")
        self.tile.entries[value, ""] = entry

    def _store(self, value: Value) -> None:
        entry = self.named[value] = self.tile.entries[value, ""]
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
