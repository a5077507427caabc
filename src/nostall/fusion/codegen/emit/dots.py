"""The body of a kernel with small batched dots: one element of the batch, matrix by matrix.

Every value is a tensor of two axes; which group of loops an axis counts through is said for each
value (:mod:`nostall.fusion.codegen.loops.dot_axes`).  Dots of three long axes are ``tl.dot``, others are
sums of products.  Lanes beyond the end of a group hold anything: dots and reductions clear them.
All that is read stands first: it is on its way while warps wait for each other's factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nostall.fusion.codegen.emit.philox import counter_offsets
from nostall.fusion.codegen.emit.prologue import write_row_block
from nostall.fusion.codegen.expressions.index_width import counter_text
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.softmax import softmax_template
from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Value,
    as_tensor,
    compute_dtype,
    constant_value,
    expression,
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
from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import AxisAccess, Operand, loops_used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import group_lanes
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.graph import Node

Axes = tuple[int | None, int | None]
"""The group that each axis of a tensor counts through; None where it is 1."""

TENSOR_CORE_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class MatrixValue:
    """A value and its axes."""

    value: Value
    axes: Axes = (None, None)


def write_matrices(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``matrix``; returns the number of programs."""
    schedule = kernel.schedule
    write_row_block(kernel, lines, "pid")
    computing = Lines()
    matrices = MatrixWriter(schedule, lines, computing)
    for index in schedule.mapping.operators:
        computing(f"# {schedule.mapping.graph.describe(index)}")
        matrices.compute(index)
        if index in schedule.mapping.outputs:
            matrices.store(index)
    lines.add(computing)
    return Extent(schedule.row_count)


class MatrixWriter:
    """Writes the values of one element of the batch; every value once, turned where needed."""

    def __init__(self, schedule: Schedule, reading: Lines, computing: Lines) -> None:
        self.schedule, self.mapping, self.graph = schedule, schedule.mapping, schedule.mapping.graph
        self.load_lines, self.lines = reading, computing
        self.lane_counts = group_lanes(schedule)
        self.values: dict[int, MatrixValue] = {}
        self._transposed: dict[int, MatrixValue] = {}
        self._loaded: dict[tuple[Operand, Axes], MatrixValue] = {}
        self._load_counts: dict[int, int] = {}
        self._counters: dict[tuple[int, int], str | None] = {}

    # -- operators -------------------------------------------------------------------------------

    def compute(self, index: int) -> None:
        node = self.graph[index]
        if node.kind == "dot":
            laid = self._dot(index)
        elif node.kind == "reduce":
            laid = self._reduce(index)
        else:
            laid = self._elementwise(index)
        self.lines(f"v{index} = {laid.value.text}")
        self.values[index] = MatrixValue(Value(f"v{index}", laid.value.dtype), laid.axes)

    def _elementwise(self, index: int) -> MatrixValue:
        node, operands = self.graph[index], self.mapping.operands[index]
        axes = self._choose_axes(
            find_groups(self.mapping.loops[index], self.schedule.loop_groups), operands
        )
        given = [self._operand_value(operand, axes) for operand in operands]
        if node.op == "random":
            given += self._random_counters(index, axes)
        softmax = softmax_template(self.graph, index)
        return MatrixValue(
            expression(node, [one.value for one in given], softmax), _union_axes(given)
        )

    def _reduce(self, index: int) -> MatrixValue:
        how = make_reduction(self.graph[index])
        taken, removed = self._reduction_operand(index), self._removed_groups(index)
        text, left = taken.value.text, list(taken.axes)
        for axis, group in enumerate(taken.axes):
            if group in removed:
                text, left[axis] = how.reduce(text, axis), None
        return MatrixValue(how.from_partial(text), (left[0], left[1]))

    def _reduction_operand(self, index: int) -> MatrixValue:
        """What a reduction takes, along all that it removes, neutral beyond the end."""
        how = make_reduction(self.graph[index])
        (operand,) = self.mapping.operands[index]
        removed = self._removed_groups(index)
        kept = find_groups(self.mapping.loops[index], self.schedule.loop_groups)
        axes = self._choose_axes((*kept, *removed), (operand,))
        given = self._operand_value(operand, axes)
        text = self._broadcast(how.to_partial(given.value), given.axes, axes, removed)
        has = list(_union_axes([given]))
        for axis, group in enumerate(axes):
            if group in removed:
                has[axis] = group
                if mask := self._mask(group, axis):
                    text = f"tl.where({mask}, {text}, {how.neutral})"
        return MatrixValue(Value(text, how.dtype), (has[0], has[1]))

    def _removed_groups(self, index: int) -> tuple[int, ...]:
        return find_groups(self.mapping.reduced_loops[index], self.schedule.loop_groups)

    def _dot(self, index: int) -> MatrixValue:
        m, n, k = (self._single_group(side) for side in dot_loops(self.mapping, index))
        left, right = self.mapping.operands[index]
        if m is None or n is None or k is None:
            return self._sum_of_products(index, k)
        one, two = self._factor(left, (m, k), 1), self._factor(right, (k, n), 0)
        dtypes = {self.graph[i].dtype for i in self.graph[index].inputs}
        (dtype,) = dtypes if len(dtypes) == 1 else ("float32",)
        if dtype in TENSOR_CORE_DTYPES:
            kind = TRITON_DTYPES[dtype]
            return MatrixValue(
                Value(f"tl.dot({one}.to({kind}), {two}.to({kind}))", "float32"), (m, n)
            )
        return MatrixValue(
            Value(f'tl.dot({one}, {two}, input_precision="ieee")', "float32"), (m, n)
        )

    def _factor(self, operand: Operand, axes: Axes, common: int) -> str:
        """A factor of ``tl.dot`` as a whole matrix, 0 beyond the end of its ``common`` axis."""
        given = self._operand_value(operand, axes)
        text = as_tensor(given.value, "float32")
        text = self._broadcast(text, given.axes, axes, axes)
        group = axes[common]
        assert group is not None
        mask = self._mask(group, common)
        return f"tl.where({mask}, {text}, 0.0)" if mask else text

    def _sum_of_products(self, index: int, k: int | None) -> MatrixValue:
        """A dot with an axis of 1: a matrix times a vector, or less."""
        products = self._products(index, k)
        if k is None:
            return products
        axis = products.axes.index(k)
        left = (None, products.axes[1]) if axis == 0 else (products.axes[0], None)
        text = f"tl.sum({products.value.text}, {axis}, keep_dims=True)"
        return MatrixValue(Value(text, "float32"), left)

    def _products(self, index: int, k: int | None) -> MatrixValue:
        """What such a dot adds up, along all of ``k``, 0 beyond its end."""
        operands = self.mapping.operands[index]
        loops = self.mapping.loops[index] | self.mapping.reduced_loops[index]
        axes = self._choose_axes(find_groups(loops, self.schedule.loop_groups), operands)
        given = [self._operand_value(operand, axes) for operand in operands]
        one, two = (as_tensor(g.value, "float32") for g in given)
        text, union = f"{one} * {two}", _union_axes(given)
        if k is None:
            return MatrixValue(Value(text, "float32"), union)
        axis = axes.index(k)
        text = self._broadcast(f"({text})", union, axes, (k,))
        if mask := self._mask(k, axis):
            text = f"tl.where({mask}, {text}, 0.0)"
        has = (k, union[1]) if axis == 0 else (union[0], k)
        return MatrixValue(Value(text, "float32"), has)

    def _single_group(self, side: frozenset[int]) -> int | None:
        found = find_groups(side, self.schedule.loop_groups)
        return found[0] if found else None

    # -- axes ------------------------------------------------------------------------------------

    def _choose_axes(self, groups: Iterable[int], operands: Iterable[Operand]) -> Axes:
        """Where groups lie: as in the operand that was made here, else as the memory does."""
        waiting = list(dict.fromkeys(groups))
        found: list[int | None] = [None, None]
        for operand in sorted(operands, key=self._axis_priority, reverse=True):
            for axis, group in enumerate(self._operand_axes(operand)):
                if group in waiting and found[axis] is None:
                    found[axis] = group
                    waiting.remove(group)
        for group in waiting:
            found[1 if found[1] is None else 0] = group
        return found[0], found[1]

    def _axis_priority(self, operand: Operand) -> tuple[bool, int]:
        inside = operand.source in self.values
        groups = self._operand_axes(operand)
        return inside, sum(group is not None for group in groups)

    def _operand_axes(self, operand: Operand) -> Axes:
        """Axes of an operand as it is: made here, or in memory with the shortest step last."""
        if operand.source in self.values:
            return self.values[operand.source].axes
        node = self.graph[operand.source]
        if node.kind == "constant":
            return None, None
        weights = tensor_offset(operand.accesses, node.strides, self.mapping.loop_sizes).strides
        found = find_groups(loops_used(operand.accesses), self.schedule.loop_groups)
        steps = {
            at: min(weights.get(loop, 1 << 62) for loop in self.schedule.loop_groups[at])
            for at in found
        }
        order = sorted(found, key=lambda at: -steps[at])
        return (order[0] if len(order) > 1 else None, order[-1] if order else None)

    def _broadcast(self, text: str, has: Axes, axes: Axes, groups: Iterable[int | None]) -> str:
        """A text that has all of ``groups`` as long axes."""
        if all(has[axis] == g for axis, g in enumerate(axes) if g is not None and g in groups):
            return text
        shape = ", ".join("1" if g is None else str(self.lane_counts[g]) for g in axes)
        return f"tl.broadcast_to({text}, ({shape}))"

    def _counter(self, group: int, axis: int) -> str:
        """The place along an axis, as a tensor."""
        name = f"{'ij'[axis]}{group}"
        if (group, axis) not in self._counters:
            width, size = (
                self.lane_counts[group],
                self.schedule.count(self.schedule.loop_groups[group]),
            )
            shape = ("[:, None]", "[None, :]")[axis]
            self.load_lines(f"{name} = tl.arange(0, {width}){shape}")
            mask = f"in_{name}" if size < width else None
            if mask:
                self.load_lines(f"{mask} = {name} < {size}")
            self._counters[group, axis] = mask
        return name

    def _mask(self, group: int, axis: int) -> str | None:
        self._counter(group, axis)
        return self._counters[group, axis]

    # -- values ----------------------------------------------------------------------------------

    def _operand_value(self, operand: Operand, axes: Axes) -> MatrixValue:
        """A value whose groups lie where ``axes`` has them."""
        node = self.graph[operand.source]
        if node.op == "iota":
            return self._iota_value(operand, node, axes)
        if node.kind == "constant":
            return MatrixValue(constant_value(node))
        if operand.source not in self.values:
            return self._load(operand, node, axes)
        laid = self.values[operand.source]
        if all(group in (None, axes[axis]) for axis, group in enumerate(laid.axes)):
            return laid
        if operand.source not in self._transposed:
            name = f"t{operand.source}"
            self.lines(f"{name} = tl.trans({laid.value.text})")
            turned = MatrixValue(Value(name, laid.value.dtype), laid.axes[::-1])
            self._transposed[operand.source] = turned
        return self._transposed[operand.source]

    def _tensor_terms(
        self, places: tuple[AxisAccess, ...], strides: tuple[int, ...], axes: Axes
    ) -> tuple[list[str], Axes, list[str]]:
        """What is added to an address, the axes that has, and the masks of those."""
        return self._offset_terms(
            tensor_offset(places, strides, self.mapping.loop_sizes), loops_used(places), axes
        )

    def _offset_terms(
        self, where: Offset, loops: frozenset[int], axes: Axes
    ) -> tuple[list[str], Axes, list[str]]:
        sizes = self.mapping.loop_sizes
        found = [str(where.start)] if where.start else []
        found += offset_terms(where, self.schedule.rows, sizes, "r")
        has: list[int | None] = [None, None]
        masks = []
        for axis, group in enumerate(axes):
            if group is None or not loops & set(self.schedule.loop_groups[group]):
                continue
            counter = self._counter(group, axis)
            found += offset_terms(where, self.schedule.loop_groups[group], sizes, counter)
            has[axis] = group
            masks += [mask] if (mask := self._mask(group, axis)) else []
        return found, (has[0], has[1]), masks

    def _load(self, operand: Operand, node: Node, axes: Axes) -> MatrixValue:
        added, has, masks = self._tensor_terms(operand.accesses, node.strides, axes)
        if (operand, has) in self._loaded:
            return self._loaded[operand, has]
        number = self._load_counts.get(operand.source, 0)
        self._load_counts[operand.source] = number + 1
        name = f"x{operand.source}{f'at{number}' if number else ''}"
        address = " + ".join([f"p{operand.source}", *(added or [ZERO_TENSOR])])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        text, dtype = f"tl.load({address}{mask})", compute_dtype(node.dtype)
        if node.dtype == "bool":
            text = f"{text} != 0"
        elif node.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        self.load_lines(f"{name} = {text}")
        self._loaded[operand, has] = MatrixValue(Value(name, dtype), has)
        return self._loaded[operand, has]

    def _iota_value(self, operand: Operand, node: Node, axes: Axes) -> MatrixValue:
        added, has, _ = self._tensor_terms(operand.accesses, (1,), axes)
        dtype = compute_dtype(node.dtype)
        text = f"({' + '.join(added or [ZERO_TENSOR])}).to({TRITON_DTYPES[dtype]})"
        return MatrixValue(Value(counter_text(node, text), dtype), has)

    def _random_counters(self, index: int, axes: Axes) -> Iterator[MatrixValue]:
        """What says which random number each element takes."""
        sides = (self.schedule.rows, *self.schedule.loop_groups)
        places, sizes = self.mapping.accesses[index], self.mapping.loop_sizes
        for where in counter_offsets(self.graph[index], places, sizes, sides):
            added, has, _ = self._offset_terms(where, frozenset(where.strides), axes)
            yield MatrixValue(Value(" + ".join(added or [ZERO_TENSOR]), "int32"), has)

    def store(self, index: int) -> None:
        """Write an output to memory; of equal results in several programs the first one."""
        node, laid = self.graph[index], self.values[index]
        loops = self.mapping.loops[index]
        axes = list(laid.axes)
        for group in find_groups(loops, self.schedule.loop_groups):
            if group not in axes:
                axes[axes.index(None)] = group
        added, _, masks = self._tensor_terms(
            self.mapping.accesses[index], node.strides, (axes[0], axes[1])
        )
        masks += missing_loop_masks(loops, self.schedule.rows, self.mapping.loop_sizes, "r")
        address = " + ".join([f"p{index}", *(added or [ZERO_TENSOR])])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        self.lines(f"tl.store({address}, {to_storage(laid.value.text, node.dtype)}{mask})")


def _union_axes(given: Iterable[MatrixValue]) -> Axes:
    """The axes that some of the values have."""
    found: list[int | None] = [None, None]
    for one in given:
        for axis, group in enumerate(one.axes):
            found[axis] = group if group is not None else found[axis]
    return found[0], found[1]
