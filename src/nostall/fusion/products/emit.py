"""Triton source of a kernel that computes products and the elementwise operators around them.

A program has one tile of rows times columns (``persistent``: several, one after the other). Its
products are sums in fp32 over the depth, always in the same order, so results are deterministic.
The prologue computes tiles of the left operand. The elementwise operators are written by
:class:`~nostall.fusion.codegen.emit.tile.Tile`, as in every stitched kernel: the products take the
place of loaded values.

Of the prologue, the operators of which values have no depth (the scale of a row) are computed
before the loop over the depth, all others in each iteration. Every tile of columns computes the
operand again, so this gains only where it costs less than to write and read the operand: a
measurement decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from nostall.fusion.codegen.emit.program import Launch, NodeNumbering, Program, assemble_file
from nostall.fusion.codegen.emit.tile import Tile
from nostall.fusion.codegen.emit.tile_parts import Chunk, Rows, TileValue
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.templates import Value, to_storage
from nostall.fusion.codegen.loops.mapping import (
    LoopMapping,
    Loops,
    Operand,
    loops_used,
    map_pattern,
)
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.planned_kernel import KernelFacts
from nostall.fusion.codegen.tiling.product_config import ProductConfig, ProductShape
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Node
from nostall.fusion.hardware import H200, Hardware
from nostall.fusion.products.product_graph import ProductGraph, contiguous_axis
from nostall.fusion.products.reductions import Partials, Reduced, reduced_axes


@dataclass(frozen=True)
class OperandAxes:
    """The loops of a prologue along the rows and the depth."""

    mapping: LoopMapping
    rows: Loops
    depth: Loops


def operand_axes(kernel: ProductGraph) -> OperandAxes | None:
    """The loops of the operators that compute the left operand; None if it is read.

    Raises :class:`BadFusion` if they have no common loops, or more than the operand.
    """
    if not kernel.prologue:
        return None
    if not kernel.shape.prologue_bytes:
        raise BadFusion("no tensor has all elements of the left operand")
    mapping = map_pattern(kernel.graph, kernel.prologue)
    rows, depth = (access.loops for access in mapping.accesses[kernel.left.index])
    if {*rows, *depth} != set(range(len(mapping.loop_sizes))):
        raise BadFusion("an operator in front of a product has more elements than the operand")
    return OperandAxes(mapping, rows, depth)


class LeftOperand:
    """Writes the lines that compute tiles of the left operand."""

    def __init__(
        self, kernel: ProductGraph, axes: OperandAxes, config: ProductConfig, lines: Lines
    ) -> None:
        self._node, self._mapping, self._lines = kernel.left, axes.mapping, lines
        self._config, self._depth = config, kernel.shape.depth
        self._schedule = Schedule(axes.mapping, axes.rows, axes.depth)

    def write_rows(self, mask: str | None) -> Tile:
        """Write what is the same for the whole depth of a tile of rows ``r``.

        ``mask``: which of the rows exist; None if all do.
        """
        rows = Rows(self._schedule.rows, self._config.rows, "r", mask, "tile == 0")
        tile = Tile(KernelFacts(self._schedule), self._schedule.columns, rows, (), self._lines)
        for index in self._mapping.operators:
            if not tile.has_columns(index):
                tile.compute(index)
        depth = set(self._schedule.columns)
        for index in self._mapping.operators:
            for operand in self._mapping.operands[index]:
                is_row_value = not loops_used(operand.accesses) & depth
                if self._mapping.is_in_memory(operand) and is_row_value:
                    tile.operand_value(operand, None)
        return tile

    def write_operand(self, row_tile: Tile) -> str:
        """Write the operand's tile at depth ``k``, with 0 beyond the end; returns its text.

        ``row_tile``: the tile of :meth:`write_rows`.
        """
        lines, width = self._lines, self._config.depth
        mask = "deep" if self._depth % width else None
        lines("e = k + d[None, :]")
        if mask:
            lines(f"{mask} = e < {self._depth}")
        tile = row_tile.with_chunk(Chunk(width, "e", mask, ""))
        for index in self._mapping.operators:
            if tile.has_columns(index):
                tile.compute(index)
        value = tile.values[self._node.index, ""].value
        text = f"tl.broadcast_to({value.text}, ({self._config.rows}, {width}))"
        if mask:
            text = f"tl.where({mask}, {text}, 0.0)"
        lines(f"computed = {text}")
        return to_storage("computed", self._node.dtype)


MAX_NAMED_OPERATORS, UNNAMED = 4, ("cast", "copy")
"""Operators in the name of a kernel, on each side of the products, and those left out."""


@dataclass(frozen=True)
class _Axes:
    """The loops of a kernel along the rows and the columns of its products."""

    mapping: LoopMapping
    rows: Loops
    columns: Loops
    reduced: tuple[Reduced, ...] = ()

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.mapping, self.rows, self.columns)

    @property
    def late(self) -> set[int]:
        """The operators that follow the products' kernel."""
        return {i for each in self.reduced for i in (*each.reductions, *each.finishing)}


class _ProductTile(Tile):
    """A tile that reads products from registers."""

    products: dict[int, str]
    """Name of the sum of each product node."""

    def _load(self, operand: Operand, chunk: Chunk | None) -> TileValue:
        name = self.products.get(operand.source)
        if name is None:
            return super()._load(operand, chunk)
        return TileValue(Value(name, "float32"), True, True)


def emit_products(
    kernel: ProductGraph, config: ProductConfig, hardware: Hardware = H200
) -> Program:
    """The source and the launch of a kernel; persistent programs are as many as ``hardware`` holds.

    Raises :class:`BadFusion` if the elementwise operators have no common loops with the products.
    """
    axes, left, lines = product_axes(kernel), operand_axes(kernel), Lines()
    partials = Partials(axes.reduced, axes.schedule, kernel.shape, config)
    with lines.block():
        operand = LeftOperand(kernel, left, config, lines) if left else None
        _Body(kernel, config, axes, operand, lines, hardware, partials).write()
    dots, mapping = set(kernel.dots), axes.mapping
    factors = [*(left.mapping.inputs if left else (kernel.left.index,))]
    factors += [node.index for node in kernel.rights]
    others = [index for index in mapping.inputs if index not in dots]
    inputs = tuple(dict.fromkeys([*factors, *others]))
    outputs, spaces = kernel.graph.outputs, partials.workspaces
    early = [index for index in outputs if index not in axes.late]
    launch = Launch(
        _name(kernel),
        (*(f"p{index}" for index in (*inputs, *early)), *(space.name for space in spaces)),
        (),
        (config.programs(kernel.shape, hardware), 1),
        config.warps,
        aligned=config.descriptors,
        num_stages=config.stages,
        needs_scratch=config.descriptors,
    )
    numbers = NodeNumbering(inputs)
    kernels = [(lines, launch), *partials.launches(launch.name)]
    source, launches = assemble_file(str(config), kernels, numbers)
    names = numbers.tensor_arguments((*inputs, *outputs))
    spaces = tuple(replace(each, name=numbers.renumber(each.name)) for each in spaces)
    return Program(kernel.graph, config, source, inputs, outputs, names, launches, spaces)


def product_axes(kernel: ProductGraph) -> _Axes:
    """The loops of the elementwise operators by the axis of the products that they run along.

    Raises :class:`BadFusion` if a loop runs along none, or if an operator reads a part of a
    product.
    """
    graph, dots = kernel.graph, set(kernel.dots)
    if min(kernel.shape.rows, kernel.shape.columns) < 2:
        raise BadFusion("a product of a matrix and a vector has no tiles")
    mapping = map_pattern(graph, kernel.epilogue)
    reads = {
        (operand.source, operand.accesses)
        for index in mapping.operators
        for operand in mapping.operands[index]
        if operand.source in dots
    }
    accesses = {each for _, each in reads}
    if len(accesses) != 1 or {source for source, _ in reads} != dots:
        raise BadFusion("the elementwise operators read the products at several indices")
    rows, columns = next(iter(accesses))
    whole = all(each.start == 0 and each.step == 1 for each in (rows, columns))
    sizes = [
        _count(mapping, each.loops) == size
        for each, size in zip((rows, columns), graph[kernel.dots[0]].shape, strict=True)
    ]
    loops = {*rows.loops, *columns.loops}
    if not whole or not all(sizes):
        raise BadFusion("an elementwise operator reads a part of a product")
    if loops != set(range(len(mapping.loop_sizes))):
        raise BadFusion("an elementwise operator has more elements than the product")
    reduced = reduced_axes(kernel, mapping, rows.loops, columns.loops)
    axes = _Axes(mapping, rows.loops, columns.loops, reduced)
    if any(mapping.loops[index] != loops for index in {*mapping.outputs} - axes.late):
        raise BadFusion("a result has fewer elements than the product")
    return axes


def _count(mapping: LoopMapping, loops: Loops) -> int:
    count = 1
    for loop in loops:
        count *= mapping.loop_sizes[loop]
    return count


def _name(kernel: ProductGraph) -> str:
    """A kernel name for profiles: the first operators of the prologue and of the epilogue."""
    prologue, epilogue = (
        [op for op in dict.fromkeys(kernel.graph[i].op for i in operators) if op not in UNNAMED]
        for operators in (kernel.prologue, kernel.epilogue)
    )
    products = "product" * len(kernel.dots)
    return "_".join([*prologue[:MAX_NAMED_OPERATORS], products, *epilogue[:MAX_NAMED_OPERATORS]])


class _Body:
    """Writes the body of a kernel."""

    def __init__(
        self,
        kernel: ProductGraph,
        config: ProductConfig,
        axes: _Axes,
        left: LeftOperand | None,
        lines: Lines,
        hardware: Hardware,
        partials: Partials,
    ) -> None:
        self.kernel, self.config, self.axes, self.lines = kernel, config, axes, lines
        self.left, self.hardware, self.partials = left, hardware, partials
        self.shape: ProductShape = kernel.shape
        self.sums = {index: f"sum_{at}" for at, index in enumerate(kernel.dots)}

    def write(self) -> None:
        lines, config = self.lines, self.config
        if config.descriptors:
            self._make_descriptors()
        if not config.persistent:
            lines("tile = tl.program_id(0)")
            self._write_tile()
            return
        rows, columns = config.tiles(self.shape)
        programs = config.programs(self.shape, self.hardware)
        tiles = f"tl.range(tl.program_id(0), {rows * columns}, {programs}, flatten=True)"
        with lines.block(f"for tile in {tiles}:"):
            self._write_tile()

    def _write_tile(self) -> None:
        self._write_position()
        self._write_loop()
        self._write_epilogue()

    def _write_position(self) -> None:
        """The tile's place: groups of rows share the columns in the L2 cache."""
        lines, config = self.lines, self.config
        rows, columns = config.tiles(self.shape)
        width = config.group * columns
        lines(f"first = tile // {width} * {config.group}")
        lines(f"height = tl.minimum({rows} - first, {config.group})")
        lines("row = first + tile % " + f"{width} % height")
        lines(f"column = tile % {width} // height")
        lines(f"r = row * {config.rows} + tl.arange(0, {config.rows})[:, None]")
        lines(f"c = column * {config.columns} + tl.arange(0, {config.columns})[None, :]")
        if self._row_mask:
            lines(f"live = r < {self.shape.rows}")
        if self._column_mask:
            lines(f"inside = c < {self.shape.columns}")

    @property
    def _row_mask(self) -> str | None:
        return "live" if self.shape.rows % self.config.rows else None

    @property
    def _column_mask(self) -> str | None:
        return "inside" if self.shape.columns % self.config.columns else None

    # -- the loop over the depth -----------------------------------------------------------------

    def _write_loop(self) -> None:
        lines, config, shape = self.lines, self.config, self.shape
        for name in self.sums.values():
            lines(f"{name} = tl.zeros(({config.rows}, {config.columns}), tl.float32)")
        depth = shape.depth
        loop = f"tl.range(0, {depth}, {config.depth}, num_stages={config.stages})"
        if config.persistent:
            loop = f"range(0, {depth}, {config.depth})"
        if self.left or not config.descriptors:
            lines(f"d = tl.arange(0, {config.depth})")
        row_tile = self.left.write_rows(self._row_mask) if self.left else None
        with lines.block(f"for k in {loop}:"):
            if self.left and row_tile:
                lines(f"left = {self.left.write_operand(row_tile)}")
            else:
                lines(f"left = {self._load_factor(self.kernel.left, is_left=True)}")
            for node, (at, name) in zip(
                self.kernel.rights, enumerate(self.sums.values()), strict=True
            ):
                lines(f"right_{at} = {self._load_factor(node, is_left=False)}")
                precision = ', input_precision="tf32"' if shape.dtype == "float32" else ""
                lines(f"{name} = tl.dot(left, right_{at}, {name}{precision})")

    def _load_factor(self, node: Node, *, is_left: bool) -> str:
        """The load of one operand's tile: (rows, depth), or (depth, columns)."""
        if self.config.descriptors:
            axis = contiguous_axis(node)
            outer = f"row * {self.config.rows}" if is_left else f"column * {self.config.columns}"
            place = (outer, "k") if is_left else ("k", outer)
            name = self._descriptor_name(node, is_left=is_left)
            if axis == 1:
                return f"{name}.load([{place[0]}, {place[1]}])"
            return f"{name}.load([{place[1]}, {place[0]}]).T"
        first, second = node.strides
        along_depth = f"(k + d[{'None, :' if is_left else ':, None'}])"
        texts = ("r", along_depth) if is_left else (along_depth, "c")
        terms = [
            text if stride == 1 else f"{text} * {stride}"
            for text, stride in zip(texts, (first, second), strict=True)
            if stride
        ]
        masks = [self._row_mask if is_left else self._column_mask]
        if self.shape.depth % self.config.depth:
            masks.append(f"({along_depth} < {self.shape.depth})")
        mask = " & ".join(each for each in masks if each)
        broadcast = self._broadcast(node, is_left=is_left)
        address = " + ".join([f"p{node.index}", *terms, *broadcast])
        return f"tl.load({address}{f', mask={mask}, other=0.0' if mask else ''})"

    def _broadcast(self, node: Node, *, is_left: bool) -> list[str]:
        """A zero of the tile's shape, if a stride of 0 leaves an axis out of the address."""
        if all(node.strides):
            return []
        along_depth = f"d[{'None, :' if is_left else ':, None'}]"
        return [f"({'r' if is_left else 'c'} + {along_depth}) * 0"]

    # -- descriptors -----------------------------------------------------------------------------

    def _descriptor_name(self, node: Node, *, is_left: bool) -> str:
        return "left_tiles" if is_left else f"right_tiles_{self.kernel.rights.index(node)}"

    def _make_descriptors(self) -> None:
        config = self.config
        if not self.left:
            self._make_descriptor(self.kernel.left, (config.rows, config.depth), is_left=True)
        for node in dict.fromkeys(self.kernel.rights):
            self._make_descriptor(node, (config.depth, config.columns), is_left=False)

    def _make_descriptor(self, node: Node, block: tuple[int, int], *, is_left: bool) -> None:
        axis = contiguous_axis(node)
        shape, stride = node.shape, node.strides[1 - (axis or 0)]
        if axis == 0:
            shape, block = shape[::-1], (block[1], block[0])
        name = self._descriptor_name(node, is_left=is_left)
        self.lines(
            f"{name} = tl.make_tensor_descriptor(p{node.index}, shape=[{shape[0]}, {shape[1]}], "
            f"strides=[{stride}, 1], block_shape=[{block[0]}, {block[1]}])"
        )

    # -- the elementwise operators ---------------------------------------------------------------

    def _write_epilogue(self) -> None:
        """The elementwise operators for one part of the columns after the other."""
        config, lines, columns = self.config, self.lines, self.config.columns
        width = columns // config.parts
        names = {index: [name] for index, name in self.sums.items()}
        parts = 1
        while parts < config.parts:
            names = {index: self._halve(each, columns // parts) for index, each in names.items()}
            parts *= 2
        for part in range(parts):
            suffix = f"_{part}" if parts > 1 else ""
            mask = self._column_mask and f"inside{suffix}"
            if suffix:
                first = f"column * {columns} + {part * width}"
                lines(f"c{suffix} = {first} + tl.arange(0, {width})[None, :]")
                if mask:
                    lines(f"{mask} = c{suffix} < {self.shape.columns}")
            products = {index: each[part] for index, each in names.items()}
            self._write_operators(Chunk(width, f"c{suffix}", mask, suffix), products, part)

    def _halve(self, names: list[str], width: int) -> list[str]:
        """Split values into the first and the second half of their columns."""
        halves: list[str] = []
        for name in names:
            pair = [f"{name}_{half}" for half in ("low", "high")]
            shaped = f"tl.reshape({name}, ({self.config.rows}, 2, {width // 2}))"
            self.lines(f"{', '.join(pair)} = tl.split(tl.permute({shaped}, (0, 2, 1)))")
            halves += pair
        return halves

    def _write_operators(self, chunk: Chunk, products: dict[int, str], part: int) -> None:
        rows = Rows(self.axes.rows, self.config.rows, "r", self._row_mask, "tile == 0")
        facts = KernelFacts(self.axes.schedule)
        tile = _ProductTile(facts, self.axes.columns, rows, (chunk,), self.lines)
        tile.products = products
        late = self.axes.late
        tile.write(index for index in self.axes.mapping.operators if index not in late)
        self.partials.store(tile, chunk, part)
