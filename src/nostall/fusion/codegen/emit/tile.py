"""The body of a kernel: loads, operators, reductions and stores of one tile, line by line.

A tile has ``has_rows`` rows and one or more chunks of columns.  Values are kept at the shape they
need: (rows, 1) where a value has no columns, (1, columns) where it has no rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce

from nostall.fusion.codegen.emit.one_hot import one_hot_operands
from nostall.fusion.codegen.emit.philox import counter_offsets
from nostall.fusion.codegen.expressions.index_width import counter_text, fits_int32, narrow_to_int32
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.peephole import deferred_value, operator_value
from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Reduction,
    Value,
    as_tensor,
    compute_dtype,
    constant_value,
    convert,
    make_reduction,
    to_storage,
)
from nostall.fusion.codegen.loops.addresses import (
    ZERO_TENSOR,
    Offset,
    missing_loop_masks,
    offset_terms,
    tensor_offset,
)
from nostall.fusion.codegen.loops.mapping import AxisAccess, Loops, Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.loop_peeling import Peeling
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.operations import COMPARISONS


@dataclass(frozen=True)
class Rows:
    """The rows of a tile: the ``int32_text`` is (count, 1); ``mask`` says which exist (None: all);
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
    """Some columns of a tile: the ``int32_text`` is (1, width).  ``suffix`` tells names apart.
    ``peeling``: tensors with such rows are read and written by lanes, 16 bytes at a time.
    ``first`` of a turn and ``lanes``, the same in all turns, add up to the counter."""

    width: int
    counter: str
    mask: str | None
    suffix: str
    peeling: Peeling | None = None
    first: str = ""
    lanes: str = ""


@dataclass(frozen=True)
class TileValue:
    """A value and whether its tensor has rows and columns; of a counter in 64 bits also its text in
    32, between whose ends it lies."""

    value: Value
    has_rows: bool = False
    has_columns: bool = False
    int32_text: str = ""


class Tile:
    """Writes the values of one tile; every value once."""

    def __init__(
        self,
        schedule: Schedule,
        columns: Loops,
        rows: Rows,
        chunks: tuple[Chunk, ...],
        lines: Lines,
    ) -> None:
        self.schedule = schedule
        self.mapping = schedule.mapping
        self.graph = schedule.mapping.graph
        self.columns = columns
        self.rows = rows
        self.chunks = chunks
        self.lines = lines
        self.values: dict[tuple[int | Operand, str], TileValue] = {}
        # What is read again in another loop or kernel, so it has to be made as it is.
        self.materialized = frozenset(schedule.mapping.outputs)
        # Outputs that are too large to be found in L2 afterwards.
        self.evict_first: frozenset[int] = frozenset()
        # Conditions that hold nowhere in this turn, and how that is written.
        self.false_conditions: dict[int, str] = {}
        # The same node may be read at several places; names count them.
        self._loaded_operands: dict[int, list[Operand]] = {}

    def with_rows(self, rows: Rows) -> Tile:
        """The tile of other rows, inside of a loop: what has been read before is there."""
        return self._copy_with(rows, self.chunks)

    def with_chunk(self, chunk: Chunk) -> Tile:
        """The tile of other columns, inside of a loop."""
        return self._copy_with(self.rows, (chunk,))

    def with_false_conditions(self, conditions: dict[int, str]) -> Tile:
        """The tile of a turn in which conditions hold nowhere."""
        found = self._copy_with(self.rows, self.chunks)
        found.false_conditions = conditions
        return found

    def _copy_with(self, rows: Rows, chunks: tuple[Chunk, ...]) -> Tile:
        found = Tile(self.schedule, self.columns, rows, chunks, self.lines)
        found.values, found.materialized, found._loaded_operands = (
            dict(self.values),
            self.materialized,
            self._loaded_operands,
        )
        found.evict_first = self.evict_first
        return found

    def has_columns(self, index: int) -> bool:
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

    def preload(self, indices: Iterable[int], by_row: bool = True) -> None:
        """Read what operators take from memory row by row, before any of them: it is on its way
        when threads meet for a reduction.  What all rows share is in a cache and can wait; or that
        is read, where rows are worked on in turns (not ``by_row``)."""
        for index in indices:
            for operand in self.mapping.operands[index]:
                loops = loops_used(operand.accesses)
                if bool(loops & set(self.schedule.rows)) == by_row and self.mapping.is_in_memory(
                    operand
                ):
                    for chunk in self.chunks if loops & set(self.columns) else (None,):
                        self.operand_value(operand, chunk)

    def compute(self, index: int) -> None:
        self.lines(f"# {self.graph.describe(index)}")
        if self.mapping.reduced_loops.get(index):
            self._reduce(index)
        elif self.has_columns(index):
            for chunk in self.chunks:
                self._compute_elementwise(index, chunk)
        else:
            self._compute_elementwise(index, None)

    def _compute_elementwise(self, index: int, chunk: Chunk | None) -> None:
        node = self.graph[index]
        name = f"v{index}{chunk.suffix if chunk else ''}"
        operands = [self.operand_value(o, chunk) for o in self.mapping.operands[index]]
        if node.op == "random":
            operands += self._random_counters(index, chunk)
        if node.op in COMPARISONS:
            operands = _narrow_comparison(node, operands, chunk)
        values = [o.value for o in operands]
        if index in self.false_conditions:
            text, named = self.false_conditions[index], Value(name, "bool")
        elif found := deferred_value(self.graph, index, values, self.materialized, name):
            text, named = found
        else:
            if node.kind == "reduce":
                # It removes axes of 1 only.
                how = make_reduction(node)
                value = how.from_partial(how.to_partial(values[0]))
            else:
                value = operator_value(self.graph, index, values, self.materialized)
            text, named = value.text, Value(name, value.dtype)
        if text:
            self.lines(f"{name} = {text}")
        entry = TileValue(
            named, any(o.has_rows for o in operands), any(o.has_columns for o in operands)
        )
        self.values[index, chunk.suffix if chunk else ""] = entry

    def operand_value(self, operand: Operand, chunk: Chunk | None) -> TileValue:
        """The value of an operand, for the columns of ``chunk`` where it has any."""
        node = self.graph[operand.source]
        if node.op == "iota":
            return self._iota_value(operand, chunk)
        if node.kind == "constant":
            return TileValue(constant_value(node))
        if operand.source in self.mapping.accesses:
            wide = self.has_columns(operand.source)
            assert chunk or not wide
            return self.values[operand.source, chunk.suffix if chunk and wide else ""]
        return self._load(operand, chunk)

    def _iota_value(self, operand: Operand, chunk: Chunk | None) -> TileValue:
        """A counter: its value follows from its place."""
        node = self.graph[operand.source]
        by_row, by_column = self._tensor_terms(operand.accesses, (1,), chunk)
        begin = tensor_offset(operand.accesses, (1,), self.mapping.loop_sizes).start
        count = " + ".join(
            [*([str(begin)] if begin else []), *((by_row + by_column) or [ZERO_TENSOR])]
        )
        dtype = compute_dtype(node.dtype)
        text = counter_text(node, f"({count}).to({TRITON_DTYPES[dtype]})")
        short = fits_int32(node, self.graph.varying is not None)
        counter = counter_text(node, f"({count})") if short else ""
        return TileValue(Value(text, dtype), bool(by_row), bool(by_column), counter)

    def _random_counters(self, index: int, chunk: Chunk | None) -> Iterator[TileValue]:
        """What says which random number each element takes."""
        sides = (self.rows.loops, self.columns)
        places, sizes = self.mapping.accesses[index], self.mapping.loop_sizes
        for where in counter_offsets(self.graph[index], places, sizes, sides):
            by_row, by_column = self._offset_terms(where, chunk)
            text = " + ".join((by_row + by_column) or [ZERO_TENSOR])
            yield TileValue(Value(text, "int32"), bool(by_row), bool(by_column))

    # -- memory ----------------------------------------------------------------------------------

    def _tensor_terms(
        self, places: tuple[AxisAccess, ...], strides: tuple[int, ...], chunk: Chunk | None
    ) -> tuple[list[str], list[str]]:
        """Offset of a tensor by row and by column, without its constant part."""
        return self._offset_terms(tensor_offset(places, strides, self.mapping.loop_sizes), chunk)

    def _offset_terms(self, where: Offset, chunk: Chunk | None) -> tuple[list[str], list[str]]:
        by_row = offset_terms(where, self.rows.loops, self.mapping.loop_sizes, self.rows.counter)
        by_column = (
            offset_terms(where, self.columns, self.mapping.loop_sizes, chunk.counter)
            if chunk
            else []
        )
        return by_row, by_column

    def _load(self, operand: Operand, chunk: Chunk | None) -> TileValue:
        node = self.graph[operand.source]
        address, mask, rows, columns = self.load_address(operand, chunk)
        suffix = chunk.suffix if chunk and columns else ""
        if (operand, suffix) in self.values:
            return self.values[operand, suffix]
        name = self.value_name(operand, suffix)
        text = f"tl.load({address}{f', mask={mask}' if mask else ''})"
        if chunk and (peeled := self._find_peeling(f"p{operand.source}", address, chunk)):
            peeled.write_load(self.lines, name, f"p{operand.source}", self.schedule.column_count)
            text = name
        dtype = compute_dtype(node.dtype)
        if node.dtype == "bool":
            text = f"{text} != 0"
        elif node.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        if text != name:
            self.lines(f"{name} = {text}")
        entry = TileValue(Value(name, dtype), rows, columns)
        self.values[operand, suffix] = entry
        return entry

    def load_address(self, operand: Operand, chunk: Chunk | None) -> tuple[str, str, bool, bool]:
        """Where an operand is in memory, which lanes of it exist ("": all), and whether it has rows
        and columns."""
        node = self.graph[operand.source]
        where = tensor_offset(operand.accesses, node.strides, self.mapping.loop_sizes)
        by_row, by_column = self._offset_terms(where, chunk)
        begin = [f"p{operand.source}", *([str(where.start)] if where.start else [])]
        if self.rows.start and self.schedule.is_block_uniform(where.strides, self.rows.count):
            # One number for all rows: read once, it takes few registers.
            begin += offset_terms(where, self.rows.loops, self.mapping.loop_sizes, self.rows.start)
            by_row = []
        address = " + ".join([*begin, *((by_row + by_column) or [ZERO_TENSOR])])
        masks = [self.rows.mask if by_row else None, chunk.mask if chunk and by_column else None]
        return address, " & ".join(m for m in masks if m), bool(by_row), bool(by_column)

    def _find_peeling(self, memory: str, address: str, chunk: Chunk) -> Peeling | None:
        """How a tensor is read or written by lanes; None where its rows lie otherwise."""
        peeled = chunk.peeling
        by_lanes = peeled and address == f"{memory} + {peeled.row_offset} + {chunk.counter}"
        return peeled if by_lanes else None

    def value_name(self, operand: Operand, suffix: str) -> str:
        """What a value read from memory is called."""
        known = self._loaded_operands.setdefault(operand.source, [])
        if operand not in known:
            known.append(operand)
        at = known.index(operand)
        return f"x{operand.source}{f'at{at}' if at else ''}{suffix}"

    def store(self, index: int, only: str | None = None) -> None:
        """Write an output to memory, by those programs only for which ``only`` holds."""
        for chunk in self.chunks if self.has_columns(index) else (None,):
            self._store(index, chunk, only)

    def _store(self, index: int, chunk: Chunk | None, only: str | None) -> None:
        node, places = self.graph[index], self.mapping.accesses[index]
        by_row, by_column = self._tensor_terms(places, node.strides, chunk)
        loops, sizes = self.mapping.loops[index], self.mapping.loop_sizes
        masks = [f"({only})"] if only else []
        entry = self.values[index, chunk.suffix if chunk else ""]
        if by_row:
            masks += [self.rows.mask] if self.rows.mask else []
            masks += missing_loop_masks(loops, self.rows.loops, sizes, self.rows.counter)
        elif entry.has_rows:
            # All rows have the same value.
            by_row = [f"{self.rows.counter} * 0"]
            masks.append(f"({self.rows.counter} == 0)")
        elif self.rows.loops or not chunk:
            # Every program has this value; the first one writes it.
            masks.append(f"({self.rows.first})")
        if chunk:
            masks += [chunk.mask] if chunk.mask else []
            masks += missing_loop_masks(loops, self.columns, sizes, chunk.counter)
        address = " + ".join([f"p{index}", *((by_row + by_column) or [ZERO_TENSOR])])
        text = to_storage(entry.value.text, node.dtype)
        peeled = self._find_peeling(f"p{index}", address, chunk) if chunk else None
        if chunk and peeled and masks == ([chunk.mask] if chunk.mask else []):
            peeled.write_store(self.lines, f"p{index}", text, chunk.width)
            return
        mask = f", mask={' & '.join(masks)}" if masks else ""
        first = ', eviction_policy="evict_first"' if index in self.evict_first else ""
        self.lines(f"tl.store({address}, {text}{mask}{first})")

    # -- reductions ------------------------------------------------------------------------------

    def _reduce(self, index: int) -> None:
        how = make_reduction(self.graph[index])
        total, rows = self.reduce_columns(index, how)
        self.write_reduced(index, how, total, rows)

    def reduce_columns(self, index: int, how: Reduction) -> tuple[str, bool]:
        """The operand of a reduction with all its columns put together, and whether it has rows.

        Equal chunks are put together element by element first: threads meet once.
        """
        partials = [self.partial_result(index, how, chunk) for chunk in self.chunks]
        has_rows = partials[0][1]
        if len({chunk.width for chunk in self.chunks}) == 1:
            name, together = f"s{index}", partials[0][0]
            for text, _ in partials[1:]:
                self.lines(f"{name} = {how.combine(together, text)}")
                together = name
            self.lines(f"{name} = {how.reduce(together, 1)}")
            return name, has_rows
        for chunk, (text, _) in zip(self.chunks, partials, strict=True):
            self.lines(f"s{index}{chunk.suffix} = {how.reduce(text, 1)}")
        names = [f"s{index}{chunk.suffix}" for chunk in self.chunks]
        return reduce(how.combine, names), has_rows

    def partial_result(self, index: int, how: Reduction, chunk: Chunk) -> tuple[str, bool]:
        """What ``chunk`` gives to the reduction ``index``, as a tensor with columns, and whether
        it has rows; lanes beyond the last column are neutral."""
        entry = self.operand_value(self.mapping.operands[index][0], chunk)
        text = how.to_partial(entry.value)
        if not entry.has_columns:
            count = self.rows.count if entry.has_rows else 1
            text = f"tl.broadcast_to({text}, ({count}, {chunk.width}))"
        if chunk.mask:
            text = f"tl.where({chunk.mask}, {text}, {how.neutral})"
        return text, entry.has_rows

    def accumulate(self, index: int, how: Reduction, chunk: Chunk) -> str:
        """The running value of a reduction with what ``chunk`` gives to it."""
        found = one_hot_operands(self.schedule, index) if chunk.mask is None else None
        if found and all(self._is_available(operand, chunk) for operand in found):
            chosen, value = (self.operand_value(operand, chunk).value for operand in found)
            return f"tl.where({convert(chosen, 'bool')}, {as_tensor(value, how.dtype)}, a{index})"
        return how.combine(f"a{index}", self.partial_result(index, how, chunk)[0])

    def _is_available(self, operand: Operand, chunk: Chunk) -> bool:
        """Whether an operand can be written in this loop: what is computed may be so in another."""
        inside = operand.source in self.mapping.accesses
        suffix = chunk.suffix if inside and self.has_columns(operand.source) else ""
        return not inside or (operand.source, suffix) in self.values

    def write_reduced(self, index: int, how: Reduction, text: str, rows: bool) -> None:
        """Name the result of a reduction."""
        result = how.from_partial(text)
        self.lines(f"v{index} = {result.text}")
        self.values[index, ""] = TileValue(Value(f"v{index}", result.dtype), rows)


def _narrow_comparison(node: Node, given: list[TileValue], chunk: Chunk | None) -> list[TileValue]:
    """The operands of a comparison with a counter in 32 bits: 64 are compared half by half, element
    by element.  What a row has once and is beyond the ends compares alike from there."""
    if not any(entry.int32_text for entry in given):
        return given
    texts = [
        entry.int32_text or narrow_to_int32(entry.value, not entry.has_columns) for entry in given
    ]
    if not all(texts):
        return given
    counter = f"({chunk.counter})" if chunk and chunk.lanes else ""
    others = [at for at, entry in enumerate(given) if not entry.int32_text]
    if chunk and node.op in ("eq", "ne") and counter in texts and others:
        # LLVM would count in 64 bits, for the sake of addresses, and compare so.
        (at,) = others
        if given[at].value.number is None:
            texts = [f"({texts[at]} - {chunk.first})"] * 2
            texts[1 - at] = chunk.lanes
    return [
        TileValue(Value(text, "int32", entry.value.number), entry.has_rows, entry.has_columns)
        for text, entry in zip(texts, given, strict=True)
    ]
