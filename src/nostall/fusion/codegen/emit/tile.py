"""The body of a kernel: loads, operators, reductions and stores of one tile, line by line.

A tile has ``rows`` rows and one or more chunks of columns.  Values are kept at the shape they
need: (rows, 1) where a value has no columns, (1, columns) where it has no rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

from nostall.fusion.codegen.emit.one_hot import picked
from nostall.fusion.codegen.emit.philox import counted
from nostall.fusion.codegen.expressions.index_width import from_steps, is_short, shortened
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.peephole import left_to_readers, written
from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Reduction,
    Value,
    computed,
    constant,
    converted,
    reduction,
    stored,
    tensor,
)
from nostall.fusion.codegen.loops.addresses import ZERO, Offset, first_of_missing, offset, terms
from nostall.fusion.codegen.loops.mapping import Loops, Operand, Place, used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.loop_peeling import Peeled
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.operations import COMPARISONS


@dataclass(frozen=True)
class Rows:
    """The rows of a tile: the ``counter`` is (count, 1); ``mask`` says which exist (None: all);
    ``first`` is true, for all of them, where they begin with row 0.  ``start``: the number of the
    first one, where that is a multiple of the count."""

    loops: Loops
    count: int
    counter: str
    mask: str | None
    first: str
    start: str = ""


@dataclass(frozen=True)
class Chunk:
    """Some columns of a tile: the ``counter`` is (1, width).  ``suffix`` tells names apart.
    ``peeled``: tensors with such rows are read and written by lanes, 16 bytes at a time.
    ``first`` of a turn and ``lanes``, the same in all turns, add up to the counter."""

    width: int
    counter: str
    mask: str | None
    suffix: str
    peeled: Peeled | None = None
    first: str = ""
    lanes: str = ""


@dataclass(frozen=True)
class Entry:
    """A value and whether its tensor has rows and columns; of a counter in 64 bits also its text in
    32, between whose ends it lies."""

    value: Value
    rows: bool = False
    columns: bool = False
    counter: str = ""


class Tile:
    """Writes the values of one tile; every value once."""

    def __init__(
        self, of: Schedule, columns: Loops, rows: Rows, chunks: tuple[Chunk, ...], lines: Lines
    ) -> None:
        self.of = of
        self.mapping = of.mapping
        self.graph = of.mapping.graph
        self.columns = columns
        self.rows = rows
        self.chunks = chunks
        self.lines = lines
        self.entries: dict[tuple[int | Operand, str], Entry] = {}
        # What is read again in another loop or kernel, so it has to be made as it is.
        self.kept = frozenset(of.mapping.outputs)
        # Outputs that are too large to be found in L2 afterwards.
        self.streamed: frozenset[int] = frozenset()
        # Conditions that hold nowhere in this turn, and how that is written.
        self.absent: dict[int, str] = {}
        # The same node may be read at several places; names count them.
        self._places: dict[int, list[Operand]] = {}

    def inside(self, rows: Rows) -> Tile:
        """The tile of other rows, inside of a loop: what has been read before is there."""
        return self._other(rows, self.chunks)

    def over(self, chunk: Chunk) -> Tile:
        """The tile of other columns, inside of a loop."""
        return self._other(self.rows, (chunk,))

    def without(self, conditions: dict[int, str]) -> Tile:
        """The tile of a turn in which conditions hold nowhere."""
        found = self._other(self.rows, self.chunks)
        found.absent = conditions
        return found

    def _other(self, rows: Rows, chunks: tuple[Chunk, ...]) -> Tile:
        found = Tile(self.of, self.columns, rows, chunks, self.lines)
        found.entries, found.kept, found._places = dict(self.entries), self.kept, self._places
        found.streamed = self.streamed
        return found

    def is_wide(self, index: int) -> bool:
        return bool(self.mapping.loops[index] & set(self.columns))

    # -- operators -------------------------------------------------------------------------------

    def write(self, indices: Iterable[int], stores: Container[int] | None = None) -> None:
        """Write operators in topological order, with the stores of those that are outputs (or
        of those among ``stores``)."""
        chosen = self.mapping.outputs if stores is None else stores
        for index in indices:
            self.compute(index)
            if index in chosen:
                self.store(index)

    def load_ahead(self, indices: Iterable[int], by_row: bool = True) -> None:
        """Read what operators take from memory row by row, before any of them: it is on its way
        when threads meet for a reduction.  What all rows share is in a cache and can wait; or that
        is read, where rows are worked on in turns (not ``by_row``)."""
        for index in indices:
            for operand in self.mapping.operands[index]:
                loops = used(operand.places)
                if bool(loops & set(self.of.rows)) == by_row and self.mapping.is_outside(operand):
                    for chunk in self.chunks if loops & set(self.columns) else (None,):
                        self.operand(operand, chunk)

    def compute(self, index: int) -> None:
        self.lines(f"# {self.graph.describe(index)}")
        if self.mapping.reduced.get(index):
            self._reduce(index)
        elif self.is_wide(index):
            for chunk in self.chunks:
                self._operate(index, chunk)
        else:
            self._operate(index, None)

    def _operate(self, index: int, chunk: Chunk | None) -> None:
        node = self.graph[index]
        name = f"v{index}{chunk.suffix if chunk else ''}"
        operands = [self.operand(o, chunk) for o in self.mapping.operands[index]]
        if node.op == "random":
            operands += self._counted(index, chunk)
        if node.op in COMPARISONS:
            operands = _in_32_bits(node, operands, chunk)
        values = [o.value for o in operands]
        if index in self.absent:
            text, named = self.absent[index], Value(name, "bool")
        elif found := left_to_readers(self.graph, index, values, self.kept, name):
            text, named = found
        else:
            if node.kind == "reduce":
                # It removes axes of 1 only.
                how = reduction(node)
                value = how.result(how.partial(values[0]))
            else:
                value = written(self.graph, index, values, self.kept)
            text, named = value.text, Value(name, value.dtype)
        if text:
            self.lines(f"{name} = {text}")
        entry = Entry(named, any(o.rows for o in operands), any(o.columns for o in operands))
        self.entries[index, chunk.suffix if chunk else ""] = entry

    def operand(self, operand: Operand, chunk: Chunk | None) -> Entry:
        """The value of an operand, for the columns of ``chunk`` where it has any."""
        node = self.graph[operand.source]
        if node.op == "iota":
            return self._iota(operand, chunk)
        if node.kind == "constant":
            return Entry(constant(node))
        if operand.source in self.mapping.places:
            wide = self.is_wide(operand.source)
            assert chunk or not wide
            return self.entries[operand.source, chunk.suffix if chunk and wide else ""]
        return self._read(operand, chunk)

    def _iota(self, operand: Operand, chunk: Chunk | None) -> Entry:
        """A counter: its value follows from its place."""
        node = self.graph[operand.source]
        by_row, by_column = self._terms(operand.places, (1,), chunk)
        begin = offset(operand.places, (1,), self.mapping.sizes).start
        count = " + ".join([*([str(begin)] if begin else []), *((by_row + by_column) or [ZERO])])
        dtype = computed(node.dtype)
        text = from_steps(node, f"({count}).to({TRITON_DTYPES[dtype]})")
        short = is_short(node, self.graph.varying is not None)
        counter = from_steps(node, f"({count})") if short else ""
        return Entry(Value(text, dtype), bool(by_row), bool(by_column), counter)

    def _counted(self, index: int, chunk: Chunk | None) -> Iterator[Entry]:
        """What says which random number each element takes."""
        sides = (self.rows.loops, self.columns)
        places, sizes = self.mapping.places[index], self.mapping.sizes
        for where in counted(self.graph[index], places, sizes, sides):
            by_row, by_column = self._split(where, chunk)
            text = " + ".join((by_row + by_column) or [ZERO])
            yield Entry(Value(text, "int32"), bool(by_row), bool(by_column))

    # -- memory ----------------------------------------------------------------------------------

    def _terms(
        self, places: tuple[Place, ...], strides: tuple[int, ...], chunk: Chunk | None
    ) -> tuple[list[str], list[str]]:
        """Offset of a tensor by row and by column, without its constant part."""
        return self._split(offset(places, strides, self.mapping.sizes), chunk)

    def _split(self, where: Offset, chunk: Chunk | None) -> tuple[list[str], list[str]]:
        by_row = terms(where, self.rows.loops, self.mapping.sizes, self.rows.counter)
        by_column = terms(where, self.columns, self.mapping.sizes, chunk.counter) if chunk else []
        return by_row, by_column

    def _read(self, operand: Operand, chunk: Chunk | None) -> Entry:
        node = self.graph[operand.source]
        address, mask, rows, columns = self.address(operand, chunk)
        suffix = chunk.suffix if chunk and columns else ""
        if (operand, suffix) in self.entries:
            return self.entries[operand, suffix]
        name = self.name(operand, suffix)
        text = f"tl.load({address}{f', mask={mask}' if mask else ''})"
        if chunk and (peeled := self._peeled(f"p{operand.source}", address, chunk)):
            peeled.load(self.lines, name, f"p{operand.source}", self.of.column_count)
            text = name
        dtype = computed(node.dtype)
        if node.dtype == "bool":
            text = f"{text} != 0"
        elif node.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        if text != name:
            self.lines(f"{name} = {text}")
        entry = Entry(Value(name, dtype), rows, columns)
        self.entries[operand, suffix] = entry
        return entry

    def address(self, operand: Operand, chunk: Chunk | None) -> tuple[str, str, bool, bool]:
        """Where an operand is in memory, which lanes of it exist ("": all), and whether it has rows
        and columns."""
        node = self.graph[operand.source]
        where = offset(operand.places, node.strides, self.mapping.sizes)
        by_row, by_column = self._split(where, chunk)
        begin = [f"p{operand.source}", *([str(where.start)] if where.start else [])]
        if self.rows.start and self.of.is_of_block(where.weights, self.rows.count):
            # One number for all rows: read once, it takes few registers.
            begin += terms(where, self.rows.loops, self.mapping.sizes, self.rows.start)
            by_row = []
        address = " + ".join([*begin, *((by_row + by_column) or [ZERO])])
        masks = [self.rows.mask if by_row else None, chunk.mask if chunk and by_column else None]
        return address, " & ".join(m for m in masks if m), bool(by_row), bool(by_column)

    def _peeled(self, memory: str, address: str, chunk: Chunk) -> Peeled | None:
        """How a tensor is read or written by lanes; None where its rows lie otherwise."""
        peeled = chunk.peeled
        by_lanes = peeled and address == f"{memory} + {peeled.row} + {chunk.counter}"
        return peeled if by_lanes else None

    def name(self, operand: Operand, suffix: str) -> str:
        """What a value read from memory is called."""
        known = self._places.setdefault(operand.source, [])
        if operand not in known:
            known.append(operand)
        at = known.index(operand)
        return f"x{operand.source}{f'at{at}' if at else ''}{suffix}"

    def store(self, index: int, only: str | None = None) -> None:
        """Write an output to memory, by those programs only for which ``only`` holds."""
        for chunk in self.chunks if self.is_wide(index) else (None,):
            self._store(index, chunk, only)

    def _store(self, index: int, chunk: Chunk | None, only: str | None) -> None:
        node, places = self.graph[index], self.mapping.places[index]
        by_row, by_column = self._terms(places, node.strides, chunk)
        loops, sizes = self.mapping.loops[index], self.mapping.sizes
        masks = [f"({only})"] if only else []
        entry = self.entries[index, chunk.suffix if chunk else ""]
        if by_row:
            masks += [self.rows.mask] if self.rows.mask else []
            masks += first_of_missing(loops, self.rows.loops, sizes, self.rows.counter)
        elif entry.rows:
            # All rows have the same value.
            by_row = [f"{self.rows.counter} * 0"]
            masks.append(f"({self.rows.counter} == 0)")
        elif self.rows.loops or not chunk:
            # Every program has this value; the first one writes it.
            masks.append(f"({self.rows.first})")
        if chunk:
            masks += [chunk.mask] if chunk.mask else []
            masks += first_of_missing(loops, self.columns, sizes, chunk.counter)
        address = " + ".join([f"p{index}", *((by_row + by_column) or [ZERO])])
        text = stored(entry.value.text, node.dtype)
        peeled = self._peeled(f"p{index}", address, chunk) if chunk else None
        if chunk and peeled and masks == ([chunk.mask] if chunk.mask else []):
            peeled.store(self.lines, f"p{index}", text, chunk.width)
            return
        mask = f", mask={' & '.join(masks)}" if masks else ""
        first = ', eviction_policy="evict_first"' if index in self.streamed else ""
        self.lines(f"tl.store({address}, {text}{mask}{first})")

    # -- reductions ------------------------------------------------------------------------------

    def _reduce(self, index: int) -> None:
        how = reduction(self.graph[index])
        total, rows = self.over_columns(index, how)
        self.keep_reduced(index, how, total, rows)

    def over_columns(self, index: int, how: Reduction) -> tuple[str, bool]:
        """The operand of a reduction with all its columns put together, and whether it has rows.

        Equal chunks are put together element by element first: threads meet once.
        """
        partials = [self.partial(index, how, chunk) for chunk in self.chunks]
        has_rows = partials[0][1]
        if len({chunk.width for chunk in self.chunks}) == 1:
            name, together = f"s{index}", partials[0][0]
            for text, _ in partials[1:]:
                self.lines(f"{name} = {how.both(together, text)}")
                together = name
            self.lines(f"{name} = {how.along(together, 1)}")
            return name, has_rows
        for chunk, (text, _) in zip(self.chunks, partials, strict=True):
            self.lines(f"s{index}{chunk.suffix} = {how.along(text, 1)}")
        names = [f"s{index}{chunk.suffix}" for chunk in self.chunks]
        return reduce(how.both, names), has_rows

    def partial(self, index: int, how: Reduction, chunk: Chunk) -> tuple[str, bool]:
        """What ``chunk`` gives to the reduction ``index``, as a tensor with columns, and whether
        it has rows; lanes beyond the last column are neutral."""
        entry = self.operand(self.mapping.operands[index][0], chunk)
        text = how.partial(entry.value)
        if not entry.columns:
            count = self.rows.count if entry.rows else 1
            text = f"tl.broadcast_to({text}, ({count}, {chunk.width}))"
        if chunk.mask:
            text = f"tl.where({chunk.mask}, {text}, {how.neutral})"
        return text, entry.rows

    def accumulated(self, index: int, how: Reduction, chunk: Chunk) -> str:
        """The running value of a reduction with what ``chunk`` gives to it."""
        found = picked(self.of, index) if chunk.mask is None else None
        if found and all(self._is_here(operand, chunk) for operand in found):
            chosen, value = (self.operand(operand, chunk).value for operand in found)
            return f"tl.where({converted(chosen, 'bool')}, {tensor(value, how.dtype)}, a{index})"
        return how.both(f"a{index}", self.partial(index, how, chunk)[0])

    def _is_here(self, operand: Operand, chunk: Chunk) -> bool:
        """Whether an operand can be written in this loop: what is computed may be so in another."""
        inside = operand.source in self.mapping.places
        suffix = chunk.suffix if inside and self.is_wide(operand.source) else ""
        return not inside or (operand.source, suffix) in self.entries

    def keep_reduced(self, index: int, how: Reduction, text: str, rows: bool) -> None:
        """Name the result of a reduction."""
        result = how.result(text)
        self.lines(f"v{index} = {result.text}")
        self.entries[index, ""] = Entry(Value(f"v{index}", result.dtype), rows)


def _in_32_bits(node: Node, given: list[Entry], chunk: Chunk | None) -> list[Entry]:
    """The operands of a comparison with a counter in 32 bits: 64 are compared half by half, element
    by element.  What a row has once and is beyond the ends compares alike from there."""
    if not any(entry.counter for entry in given):
        return given
    texts = [entry.counter or shortened(entry.value, not entry.columns) for entry in given]
    if not all(texts):
        return given
    counter = f"({chunk.counter})" if chunk and chunk.lanes else ""
    others = [at for at, entry in enumerate(given) if not entry.counter]
    if chunk and node.op in ("eq", "ne") and counter in texts and others:
        # LLVM would count in 64 bits, for the sake of addresses, and compare so.
        (at,) = others
        if given[at].value.number is None:
            texts = [f"({texts[at]} - {chunk.first})"] * 2
            texts[1 - at] = chunk.lanes
    return [
        Entry(Value(text, "int32", entry.value.number), entry.rows, entry.columns)
        for text, entry in zip(texts, given, strict=True)
    ]
