"""Kernel bodies of one tile: Triton lines for its loads, operators, reductions and stores.

A tile is a block of rows times one or more chunks of columns. A value has the smallest shape that
holds it: (rows, columns), (rows, 1) without columns, (1, columns) without rows, or (1, 1).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from functools import reduce

from nostall.fusion.codegen.emit.gluon import widened_blocks
from nostall.fusion.codegen.emit.one_hot import one_hot_operands
from nostall.fusion.codegen.emit.tile_parts import Chunk, Rows, TileValue, narrow_comparison
from nostall.fusion.codegen.expressions.index_width import counter_text, fits_int32
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.peephole import deferred_value, operator_value
from nostall.fusion.codegen.expressions.reductions import Reduction
from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Value,
    as_tensor,
    compute_dtype,
    constant_value,
    convert,
    to_storage,
)
from nostall.fusion.codegen.loops.addresses import (
    ZERO_TENSOR,
    Offset,
    counter_offsets,
    missing_loop_masks,
    offset_terms,
    tensor_offset,
)
from nostall.fusion.codegen.loops.mapping import AxisAccess, Loops, Operand, loops_used
from nostall.fusion.codegen.loops.schedule import block_columns
from nostall.fusion.codegen.tiling.loop_peeling import Peeling
from nostall.fusion.codegen.tiling.planned_kernel import KernelFacts
from nostall.fusion.graph.graph import Node
from nostall.fusion.graph.operations import COMPARISONS


class Tile:
    """Writes the lines that compute the values of one tile, each value once."""

    def __init__(
        self,
        facts: KernelFacts,
        columns: Loops,
        rows: Rows,
        chunks: tuple[Chunk, ...],
        lines: Lines,
    ) -> None:
        self.facts, self.schedule = facts, facts.schedule
        self.mapping = self.schedule.mapping
        self.graph = self.mapping.graph
        self.columns = columns
        self.rows = rows
        self.chunks = chunks
        self.lines = lines
        self.values: dict[tuple[int | Operand, str], TileValue] = {}
        # Values that another loop or kernel reads, so no shorter form may replace them.
        self.materialized = frozenset(self.mapping.outputs)
        # Outputs that are too large for L2; their stores get the eviction policy evict_first.
        self.evict_first: frozenset[int] = frozenset()
        # Comparisons that are false in this whole iteration, with the text of that value.
        self.false_conditions: dict[int, str] = {}
        # A node may be loaded with several accesses; the names of the values number them.
        self._loaded_operands: dict[int, list[Operand]] = {}

    def with_rows(self, rows: Rows) -> Tile:
        """A tile of other rows inside a loop. Values written before the loop stay usable."""
        return self._copy_with(rows, self.chunks)

    def with_chunk(self, chunk: Chunk) -> Tile:
        """A tile of another chunk of columns inside a loop."""
        return self._copy_with(self.rows, (chunk,))

    def with_false_conditions(self, conditions: dict[int, str]) -> Tile:
        """A tile in which the given comparisons are false in all columns."""
        tile = self._copy_with(self.rows, self.chunks)
        tile.false_conditions = conditions
        return tile

    def _copy_with(self, rows: Rows, chunks: tuple[Chunk, ...]) -> Tile:
        tile = Tile(self.facts, self.columns, rows, chunks, self.lines)
        tile.values, tile.materialized = dict(self.values), self.materialized
        tile.evict_first = self.evict_first
        # Shared, so that names of loads stay unique.
        tile._loaded_operands = self._loaded_operands
        return tile

    def has_columns(self, index: int) -> bool:
        return bool(self.mapping.loops[index] & set(self.columns))

    # -- operators -------------------------------------------------------------------------------

    def write(self, indices: Iterable[int], stores: Container[int] | None = None) -> None:
        """Write operators in topological order and the stores of ``stores`` (None: all outputs)."""
        stored = self.mapping.outputs if stores is None else stores
        for index in indices:
            self.compute(index)
            if index in stored:
                self.store(index)

    def preload(self, indices: Iterable[int], row_dependent: bool = True) -> None:
        """Load the memory operands of operators before any operator, so that the loads overlap
        with the barriers of reductions.

        By default these are the operands that differ from row to row. Operands that all rows share
        are in a cache and can be loaded late; ``row_dependent=False`` loads those instead.
        """
        for index in indices:
            for operand in self.mapping.operands[index]:
                loops = loops_used(operand.accesses)
                is_wanted = bool(loops & set(self.schedule.rows)) == row_dependent
                if is_wanted and self.mapping.is_in_memory(operand):
                    for chunk in self.chunks if loops & set(self.columns) else (None,):
                        self.operand_value(operand, chunk)

    def compute(self, index: int) -> None:
        """Write an operator for all chunks, behind a comment that names it."""
        self.lines(f"# {self.graph.describe(index)}")
        if index in self.schedule.block_reductions:
            for chunk in self.chunks:
                self._reduce_blocks(index, chunk)
        elif self.mapping.reduced_loops.get(index):
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
            operands = narrow_comparison(node, operands, chunk)
        values = [o.value for o in operands]
        if index in self.false_conditions:
            text, named = self.false_conditions[index], Value(name, "bool")
        elif deferred := deferred_value(self.graph, index, values, self.materialized, name):
            text, named = deferred
        else:
            if node.kind == "reduce":
                # This reduction only removes axes of size 1.
                reduction = self.facts.reductions[index]
                value = reduction.from_partial(reduction.to_partial(values[0]))
            else:
                value = operator_value(self.graph, index, values, self.materialized)
            text, named = value.text, Value(name, value.dtype)
        if text:
            self.lines(f"{name} = {text}")
        entry = TileValue(
            named, any(o.has_rows for o in operands), any(o.has_columns for o in operands)
        )
        self.values[index, chunk.suffix if chunk else ""] = entry
        if node.op == "checked_index":
            self._assert_in_range(node, entry, chunk)

    def _assert_in_range(self, node: Node, entry: TileValue, chunk: Chunk | None) -> None:
        """Stop the process, as PyTorch does, if an index is not a position of its axis."""
        name, masks = entry.value.text, [self.rows.mask if entry.has_rows else None]
        masks += [chunk.mask if chunk and entry.has_columns else None]
        mask = " & ".join(text for text in masks if text)
        condition = f"({name} >= 0) & ({name} < {node['size']})"
        message = f"index out of bounds: 0 <= index < {node['size']}"
        self.lines(f'tl.device_assert({condition}, "{message}"{f", mask={mask}" if mask else ""})')

    def operand_value(self, operand: Operand, chunk: Chunk | None) -> TileValue:
        """The value of an operand in the columns of ``chunk``; None if it has no columns."""
        node = self.graph[operand.source]
        if node.op == "iota":
            return self._iota_value(operand, chunk)
        if node.kind == "constant":
            return TileValue(constant_value(node))
        if operand.source in self.mapping.accesses:
            has_columns = self.has_columns(operand.source)
            assert chunk or not has_columns
            return self.values[operand.source, chunk.suffix if chunk and has_columns else ""]
        return self._load(operand, chunk)

    def _iota_value(self, operand: Operand, chunk: Chunk | None) -> TileValue:
        """The value of an iota, computed from the row and column numbers."""
        node = self.graph[operand.source]
        row_terms, column_terms = self._tensor_terms(operand.accesses, (1,), chunk)
        start = tensor_offset(operand.accesses, (1,), self.mapping.loop_sizes).start
        terms = (row_terms + column_terms) or [ZERO_TENSOR]
        steps = " + ".join([*([str(start)] if start else []), *terms])
        dtype = compute_dtype(node.dtype)
        text = counter_text(node, f"({steps}).to({TRITON_DTYPES[dtype]})")
        is_narrow = fits_int32(node, self.graph.varying is not None)
        int32_text = counter_text(node, f"({steps})") if is_narrow else ""
        return TileValue(Value(text, dtype), bool(row_terms), bool(column_terms), int32_text)

    def _random_counters(self, index: int, chunk: Chunk | None) -> Iterator[TileValue]:
        """The operands of a random tensor that select the random number of each element."""
        loop_groups = (self.rows.loops, self.columns)
        accesses, sizes = self.mapping.accesses[index], self.mapping.loop_sizes
        for offset in counter_offsets(self.graph[index], accesses, sizes, loop_groups):
            row_terms, column_terms = self._offset_terms(offset, chunk)
            text = " + ".join((row_terms + column_terms) or [ZERO_TENSOR])
            yield TileValue(Value(text, "int32"), bool(row_terms), bool(column_terms))

    # -- memory ----------------------------------------------------------------------------------

    def _tensor_terms(
        self, accesses: tuple[AxisAccess, ...], strides: tuple[int, ...], chunk: Chunk | None
    ) -> tuple[list[str], list[str]]:
        """The terms of a tensor's offset by row and by column, without its constant part."""
        return self._offset_terms(tensor_offset(accesses, strides, self.mapping.loop_sizes), chunk)

    def _offset_terms(self, offset: Offset, chunk: Chunk | None) -> tuple[list[str], list[str]]:
        sizes = self.mapping.loop_sizes
        row_terms = offset_terms(offset, self.rows.loops, sizes, self.rows.counter)
        column_terms = offset_terms(offset, self.columns, sizes, chunk.counter) if chunk else []
        return row_terms, column_terms

    def _load(self, operand: Operand, chunk: Chunk | None) -> TileValue:
        node = self.graph[operand.source]
        address, mask, has_rows, has_columns = self.load_address(operand, chunk)
        suffix = chunk.suffix if chunk and has_columns else ""
        if (operand, suffix) in self.values:
            return self.values[operand, suffix]
        name = self.value_name(operand, suffix)
        text = f"tl.load({address}{f', mask={mask}' if mask else ''})"
        if chunk and (peeling := self._peeling(f"p{operand.source}", address, chunk)):
            peeling.write_load(self.lines, name, f"p{operand.source}", self.schedule.column_count)
            text = name
        dtype = compute_dtype(node.dtype)
        if node.dtype == "bool":
            text = f"{text} != 0"
        elif node.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        if text != name:
            self.lines(f"{name} = {text}")
        entry = TileValue(Value(name, dtype), has_rows, has_columns)
        self.values[operand, suffix] = entry
        return entry

    def load_address(self, operand: Operand, chunk: Chunk | None) -> tuple[str, str, bool, bool]:
        """The address of an operand, its mask (empty: all lanes exist), and whether it has rows
        and whether it has columns."""
        node, sizes = self.graph[operand.source], self.mapping.loop_sizes
        offset = tensor_offset(operand.accesses, node.strides, sizes)
        row_terms, column_terms = self._offset_terms(offset, chunk)
        base = [f"p{operand.source}", *([str(offset.start)] if offset.start else [])]
        if self.rows.start and self.schedule.is_block_uniform(offset.strides, self.rows.count):
            # All rows of the tile have the same address: a single load takes few registers.
            base += offset_terms(offset, self.rows.loops, sizes, self.rows.start)
            row_terms = []
        address = " + ".join([*base, *((row_terms + column_terms) or [ZERO_TENSOR])])
        row_mask = self.rows.mask if row_terms else None
        column_mask = chunk.mask if chunk and column_terms else None
        mask = " & ".join(m for m in (row_mask, column_mask) if m)
        return address, mask, bool(row_terms), bool(column_terms)

    def _peeling(self, memory: str, address: str, chunk: Chunk) -> Peeling | None:
        """The peeling of a tensor that is accessed by lanes; None if its rows lie otherwise."""
        peeling = chunk.peeling
        by_lanes = peeling and address == f"{memory} + {peeling.row_offset} + {chunk.counter}"
        return peeling if by_lanes else None

    def value_name(self, operand: Operand, suffix: str) -> str:
        """The name of a value that is loaded from memory."""
        loaded = self._loaded_operands.setdefault(operand.source, [])
        if operand not in loaded:
            loaded.append(operand)
        at = loaded.index(operand)
        return f"x{operand.source}{f'at{at}' if at else ''}{suffix}"

    def store(self, index: int, condition: str | None = None) -> None:
        """Store an output; programs in which ``condition`` is false store nothing."""
        for chunk in self.chunks if self.has_columns(index) else (None,):
            self._store(index, chunk, condition)

    def _store(self, index: int, chunk: Chunk | None, condition: str | None) -> None:
        node, accesses = self.graph[index], self.mapping.accesses[index]
        row_terms, column_terms = self._tensor_terms(accesses, node.strides, chunk)
        loops, sizes = self.mapping.loops[index], self.mapping.loop_sizes
        masks = [f"({condition})"] if condition else []
        entry = self.values[index, chunk.suffix if chunk else ""]
        if row_terms:
            masks += [self.rows.mask] if self.rows.mask else []
            masks += missing_loop_masks(loops, self.rows.loops, sizes, self.rows.counter)
        elif entry.has_rows:
            # All rows have the same value; row 0 stores it.
            row_terms = [f"{self.rows.counter} * 0"]
            masks.append(f"({self.rows.counter} == 0)")
        elif self.rows.loops or not chunk:
            # All programs have the same value; the first program stores it.
            masks.append(f"({self.rows.is_first_block})")
        if chunk:
            masks += [chunk.mask] if chunk.mask else []
            masks += missing_loop_masks(loops, self.columns, sizes, chunk.counter)
        address = " + ".join([f"p{index}", *((row_terms + column_terms) or [ZERO_TENSOR])])
        text = to_storage(entry.value.text, node.dtype)
        peeling = self._peeling(f"p{index}", address, chunk) if chunk else None
        if chunk and peeling and masks == ([chunk.mask] if chunk.mask else []):
            peeling.write_store(self.lines, f"p{index}", text, chunk.width)
            return
        mask = f", mask={' & '.join(masks)}" if masks else ""
        eviction = ', eviction_policy="evict_first"' if index in self.evict_first else ""
        self.lines(f"tl.store({address}, {text}{mask}{eviction})")

    # -- reductions ------------------------------------------------------------------------------

    def _reduce(self, index: int) -> None:
        reduction = self.facts.reductions[index]
        total, has_rows = self.reduce_columns(index, reduction)
        self.write_reduction_result(index, reduction, total, has_rows)

    def reduce_columns(self, index: int, reduction: Reduction) -> tuple[str, bool]:
        """The operand of a reduction reduced over all columns, and whether it has rows.

        Chunks of equal width are first combined element by element, so that threads exchange
        values once and not once for each chunk.
        """
        partials = [self.partial_result(index, reduction, chunk) for chunk in self.chunks]
        has_rows = partials[0][1]
        if len({chunk.width for chunk in self.chunks}) == 1:
            name, combined = f"s{index}", partials[0][0]
            for text, _ in partials[1:]:
                self.lines(f"{name} = {reduction.combine(combined, text)}")
                combined = name
            self.lines(f"{name} = {reduction.reduce(combined, 1)}")
            return name, has_rows
        for chunk, (text, _) in zip(self.chunks, partials, strict=True):
            self.lines(f"s{index}{chunk.suffix} = {reduction.reduce(text, 1)}")
        names = [f"s{index}{chunk.suffix}" for chunk in self.chunks]
        return reduce(reduction.combine, names), has_rows

    def partial_result(self, index: int, reduction: Reduction, chunk: Chunk) -> tuple[str, bool]:
        """The operand of a reduction in ``chunk`` as a tensor with columns, and whether it has
        rows. Lanes behind the last column hold the neutral element."""
        entry = self.operand_value(self.mapping.operands[index][0], chunk)
        text = reduction.to_partial(entry.value)
        if not entry.has_columns:
            count = self.rows.count if entry.has_rows else 1
            text = f"tl.broadcast_to({text}, ({count}, {chunk.width}))"
        if chunk.mask:
            text = f"tl.where({chunk.mask}, {text}, {reduction.neutral})"
        return text, entry.has_rows

    def _reduce_blocks(self, index: int, chunk: Chunk) -> None:
        """Reduce blocks of neighbouring columns; all columns of a block get the result.

        A chunk has whole blocks, so a masked lane is in no block of a column that exists.
        """
        reduction, width = self.facts.reductions[index], chunk.width
        entry = self.operand_value(self.mapping.operands[index][0], chunk)
        text, count = reduction.to_partial(entry.value), self.rows.count if entry.has_rows else 1
        if not entry.has_columns:
            text = f"tl.broadcast_to({text}, ({count}, {width}))"
        size = block_columns(self.mapping, index)
        blocks, name = f"({count}, {width // size}, {size})", f"b{index}{chunk.suffix}"
        self.lines(f"{name} = {reduction.reduce(f'tl.reshape({text}, {blocks})', 2)}")
        if chunk.lanes:  # written in Gluon, which has no broadcast_to
            wide = widened_blocks(name, blocks, width, reduction.dtype)
        else:
            wide = f"tl.reshape(tl.broadcast_to({name}, {blocks}), ({count}, {width}))"
        result = reduction.from_partial(wide)
        self.lines(f"v{index}{chunk.suffix} = {result.text}")
        named = Value(f"v{index}{chunk.suffix}", result.dtype)
        self.values[index, chunk.suffix] = TileValue(named, entry.has_rows, has_columns=True)

    def accumulate(self, index: int, reduction: Reduction, chunk: Chunk) -> str:
        """The accumulator of a reduction combined with the columns of ``chunk``."""
        one_hot = one_hot_operands(self.schedule, index) if chunk.mask is None else None
        if one_hot and all(self._is_available(operand, chunk) for operand in one_hot):
            condition, value = (self.operand_value(operand, chunk).value for operand in one_hot)
            chosen = as_tensor(value, reduction.dtype)
            return f"tl.where({convert(condition, 'bool')}, {chosen}, a{index})"
        return reduction.combine(f"a{index}", self.partial_result(index, reduction, chunk)[0])

    def _is_available(self, operand: Operand, chunk: Chunk) -> bool:
        """Whether this loop has the value of an operand: another loop may compute it."""
        is_computed = operand.source in self.mapping.accesses
        suffix = chunk.suffix if is_computed and self.has_columns(operand.source) else ""
        return not is_computed or (operand.source, suffix) in self.values

    def write_reduction_result(
        self, index: int, reduction: Reduction, text: str, has_rows: bool
    ) -> None:
        """Assign the result of a reduction to its name; ``text`` is the reduced accumulator."""
        result = reduction.from_partial(text)
        self.lines(f"v{index} = {result.text}")
        self.values[index, ""] = TileValue(Value(f"v{index}", result.dtype), has_rows)
