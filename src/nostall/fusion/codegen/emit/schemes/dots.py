"""Kernel bodies with small batched dots, the scheme ``matrix``: one batch element for each program.

Every value is a tensor of two axes. Each axis counts through a group of loops, which can differ
from value to value (:mod:`~nostall.fusion.codegen.loops.dot_axes`). A dot becomes ``tl.dot`` if its
three axes are longer than 1, else a sum of products. Lanes behind the end of a group have undefined
values, which dots and reductions mask. All loads come first, so that they overlap with the
barriers between warps that exchange the factors of dots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nostall.fusion.codegen.emit.tile_parts import write_row_block
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
from nostall.fusion.codegen.loops.dot_axes import dot_loops, find_groups
from nostall.fusion.codegen.loops.mapping import AxisAccess, Operand, loops_used
from nostall.fusion.codegen.tiling.planned_kernel import KernelFacts, PlannedKernel
from nostall.fusion.codegen.tiling.tile_sizes import group_lanes
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.graph import Node

Axes = tuple[int | None, int | None]
"""The loop group of each axis of a tensor; None for an axis of size 1."""

TENSOR_CORE_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class MatrixValue:
    """A value of the kernel and the axes of its tensor."""

    value: Value
    axes: Axes = (None, None)


def write_matrices(kernel: PlannedKernel, lines: Lines) -> int:
    """Write the body of the kernel of the scheme ``matrix``; returns the number of programs."""
    schedule = kernel.schedule
    write_row_block(kernel, lines, "pid")
    compute_lines = Lines()
    writer = MatrixWriter(kernel.facts, lines, compute_lines)
    for index in schedule.mapping.operators:
        compute_lines(f"# {schedule.mapping.graph.describe(index)}")
        writer.compute(index)
        if index in schedule.mapping.outputs:
            writer.store(index)
    lines.add(compute_lines)
    return Extent(schedule.row_count)


class MatrixWriter:
    """Writes the lines that compute the values of one batch element, each value once.

    ``load_lines`` get the loads and the index tensors, ``lines`` all other lines.
    """

    def __init__(self, facts: KernelFacts, load_lines: Lines, lines: Lines) -> None:
        self.facts, self.schedule, self.mapping = facts, facts.schedule, facts.schedule.mapping
        self.graph = self.mapping.graph
        self.load_lines, self.lines = load_lines, lines
        # Lanes of an axis that counts through a group: a power of two.
        self.lane_counts = group_lanes(self.schedule)
        self.values: dict[int, MatrixValue] = {}
        self._transposed: dict[int, MatrixValue] = {}
        self._loaded: dict[tuple[Operand, Axes], MatrixValue] = {}
        # How many times each node has been loaded; the names of the values number the loads.
        self._load_counts: dict[int, int] = {}
        # Masks of the index tensors written so far, by group and axis; None if all lanes exist.
        self._masks: dict[tuple[int, int], str | None] = {}

    # -- operators -------------------------------------------------------------------------------

    def compute(self, index: int) -> None:
        """Write an operator."""
        node = self.graph[index]
        if node.kind == "dot":
            result = self._dot(index)
        elif node.kind == "reduce":
            result = self._reduce(index)
        else:
            result = self._elementwise(index)
        self.lines(f"v{index} = {result.value.text}")
        self.values[index] = MatrixValue(Value(f"v{index}", result.value.dtype), result.axes)

    def _elementwise(self, index: int) -> MatrixValue:
        node, operands = self.graph[index], self.mapping.operands[index]
        groups = find_groups(self.mapping.loops[index], self.schedule.loop_groups)
        axes = self._choose_axes(groups, operands)
        values = [self._operand_value(operand, axes) for operand in operands]
        if node.op == "random":
            values += self._random_counters(index, axes)
        softmax = softmax_template(self.graph, index)
        result = expression(node, [each.value for each in values], softmax)
        return MatrixValue(result, _union_axes(values))

    def _reduce(self, index: int) -> MatrixValue:
        reduction = self.facts.reductions[index]
        operand, removed = self._reduction_operand(index), self._removed_groups(index)
        text, axes = operand.value.text, list(operand.axes)
        for axis, group in enumerate(operand.axes):
            if group in removed:
                text, axes[axis] = reduction.reduce(text, axis), None
        return MatrixValue(reduction.from_partial(text), (axes[0], axes[1]))

    def _reduction_operand(self, index: int) -> MatrixValue:
        """The operand of a reduction, broadcast along all groups that the reduction removes. Lanes
        behind the end of these groups hold the neutral element."""
        reduction = self.facts.reductions[index]
        (operand,) = self.mapping.operands[index]
        removed = self._removed_groups(index)
        result_groups = find_groups(self.mapping.loops[index], self.schedule.loop_groups)
        axes = self._choose_axes((*result_groups, *removed), (operand,))
        value = self._operand_value(operand, axes)
        text = self._broadcast(reduction.to_partial(value.value), value.axes, axes, removed)
        broadcast_axes = list(_union_axes([value]))
        for axis, group in enumerate(axes):
            if group in removed:
                broadcast_axes[axis] = group
                if mask := self._mask(group, axis):
                    text = f"tl.where({mask}, {text}, {reduction.neutral})"
        return MatrixValue(Value(text, reduction.dtype), (broadcast_axes[0], broadcast_axes[1]))

    def _removed_groups(self, index: int) -> tuple[int, ...]:
        return find_groups(self.mapping.reduced_loops[index], self.schedule.loop_groups)

    def _dot(self, index: int) -> MatrixValue:
        m, n, k = (self._single_group(side) for side in dot_loops(self.mapping, index))
        left, right = self.mapping.operands[index]
        if m is None or n is None or k is None:
            return self._sum_of_products(index, k)
        a, b = self._factor(left, (m, k), 1), self._factor(right, (k, n), 0)
        dtypes = {self.graph[i].dtype for i in self.graph[index].inputs}
        (dtype,) = dtypes if len(dtypes) == 1 else ("float32",)
        if dtype in TENSOR_CORE_DTYPES:
            cast = f".to({TRITON_DTYPES[dtype]})"
            text = f"tl.dot({a}{cast}, {b}{cast})"
        else:
            text = f'tl.dot({a}, {b}, input_precision="ieee")'
        return MatrixValue(Value(text, "float32"), (m, n))

    def _factor(self, operand: Operand, axes: Axes, k_axis: int) -> str:
        """A factor of ``tl.dot``, broadcast along both axes; 0 behind the end of ``k_axis``."""
        value = self._operand_value(operand, axes)
        text = as_tensor(value.value, "float32")
        text = self._broadcast(text, value.axes, axes, axes)
        group = axes[k_axis]
        assert group is not None
        mask = self._mask(group, k_axis)
        return f"tl.where({mask}, {text}, 0.0)" if mask else text

    def _sum_of_products(self, index: int, k: int | None) -> MatrixValue:
        """A dot that has an axis of size 1, such as a matrix times a vector."""
        products = self._products(index, k)
        if k is None:
            return products
        axis = products.axes.index(k)
        result_axes = (None, products.axes[1]) if axis == 0 else (products.axes[0], None)
        text = f"tl.sum({products.value.text}, {axis}, keep_dims=True)"
        return MatrixValue(Value(text, "float32"), result_axes)

    def _products(self, index: int, k: int | None) -> MatrixValue:
        """The products that such a dot sums, along the whole group ``k``; 0 behind its end."""
        operands = self.mapping.operands[index]
        loops = self.mapping.loops[index] | self.mapping.reduced_loops[index]
        axes = self._choose_axes(find_groups(loops, self.schedule.loop_groups), operands)
        values = [self._operand_value(operand, axes) for operand in operands]
        a, b = (as_tensor(each.value, "float32") for each in values)
        text, union = f"{a} * {b}", _union_axes(values)
        if k is None:
            return MatrixValue(Value(text, "float32"), union)
        axis = axes.index(k)
        text = self._broadcast(f"({text})", union, axes, (k,))
        if mask := self._mask(k, axis):
            text = f"tl.where({mask}, {text}, 0.0)"
        product_axes = (k, union[1]) if axis == 0 else (union[0], k)
        return MatrixValue(Value(text, "float32"), product_axes)

    def _single_group(self, loops: frozenset[int]) -> int | None:
        """The group of one side of a dot; None if that side has size 1."""
        groups = find_groups(loops, self.schedule.loop_groups)
        return groups[0] if groups else None

    # -- axes ------------------------------------------------------------------------------------

    def _choose_axes(self, groups: Iterable[int], operands: Iterable[Operand]) -> Axes:
        """The axis of each group: as in the operands, computed operands first."""
        unplaced = list(dict.fromkeys(groups))
        axes: list[int | None] = [None, None]
        for operand in sorted(operands, key=self._axis_priority, reverse=True):
            for axis, group in enumerate(self._operand_axes(operand)):
                if group in unplaced and axes[axis] is None:
                    axes[axis] = group
                    unplaced.remove(group)
        for group in unplaced:
            axes[1 if axes[1] is None else 0] = group
        return axes[0], axes[1]

    def _axis_priority(self, operand: Operand) -> tuple[bool, int]:
        is_computed = operand.source in self.values
        return is_computed, sum(group is not None for group in self._operand_axes(operand))

    def _operand_axes(self, operand: Operand) -> Axes:
        """The axes of an operand: of its value if the kernel computes it, else of its memory layout
        with the smallest stride last."""
        if operand.source in self.values:
            return self.values[operand.source].axes
        node = self.graph[operand.source]
        if node.kind == "constant":
            return None, None
        strides = tensor_offset(operand.accesses, node.strides, self.mapping.loop_sizes).strides
        groups = find_groups(loops_used(operand.accesses), self.schedule.loop_groups)
        group_strides = {
            group: min(strides.get(loop, 1 << 62) for loop in self.schedule.loop_groups[group])
            for group in groups
        }
        order = sorted(groups, key=lambda group: -group_strides[group])
        return (order[0] if len(order) > 1 else None, order[-1] if order else None)

    def _broadcast(self, text: str, present: Axes, axes: Axes, groups: Iterable[int | None]) -> str:
        """A tensor of axes ``present``, broadcast to ``axes`` if it lacks one of ``groups``."""
        if all(present[axis] == g for axis, g in enumerate(axes) if g is not None and g in groups):
            return text
        shape = ", ".join("1" if g is None else str(self.lane_counts[g]) for g in axes)
        return f"tl.broadcast_to({text}, ({shape}))"

    def _counter(self, group: int, axis: int) -> str:
        """The name of the index tensor of a group along an axis; written at its first use."""
        name = f"{'ij'[axis]}{group}"
        if (group, axis) not in self._masks:
            width = self.lane_counts[group]
            size = self.schedule.count(self.schedule.loop_groups[group])
            shape = ("[:, None]", "[None, :]")[axis]
            self.load_lines(f"{name} = tl.arange(0, {width}){shape}")
            mask = f"in_{name}" if size < width else None
            if mask:
                self.load_lines(f"{mask} = {name} < {size}")
            self._masks[group, axis] = mask
        return name

    def _mask(self, group: int, axis: int) -> str | None:
        """The mask of the lanes of a group that exist; None if all do."""
        self._counter(group, axis)
        return self._masks[group, axis]

    # -- values ----------------------------------------------------------------------------------

    def _operand_value(self, operand: Operand, axes: Axes) -> MatrixValue:
        """The value of an operand, transposed if its groups do not lie along ``axes``."""
        node = self.graph[operand.source]
        if node.op == "iota":
            return self._iota_value(operand, node, axes)
        if node.kind == "constant":
            return MatrixValue(constant_value(node))
        if operand.source not in self.values:
            return self._load(operand, node, axes)
        value = self.values[operand.source]
        if all(group in (None, axes[axis]) for axis, group in enumerate(value.axes)):
            return value
        if operand.source not in self._transposed:
            name = f"t{operand.source}"
            self.lines(f"{name} = tl.trans({value.value.text})")
            transposed = MatrixValue(Value(name, value.value.dtype), value.axes[::-1])
            self._transposed[operand.source] = transposed
        return self._transposed[operand.source]

    def _tensor_terms(
        self, accesses: tuple[AxisAccess, ...], strides: tuple[int, ...], axes: Axes
    ) -> tuple[list[str], Axes, list[str]]:
        """The terms of a tensor's offset, the axes of their sum, and the masks of these axes."""
        offset = tensor_offset(accesses, strides, self.mapping.loop_sizes)
        return self._offset_terms(offset, loops_used(accesses), axes)

    def _offset_terms(
        self, offset: Offset, loops: frozenset[int], axes: Axes
    ) -> tuple[list[str], Axes, list[str]]:
        sizes = self.mapping.loop_sizes
        terms = [str(offset.start)] if offset.start else []
        terms += offset_terms(offset, self.schedule.rows, sizes, "r")
        present: list[int | None] = [None, None]
        masks = []
        for axis, group in enumerate(axes):
            if group is None or not loops & set(self.schedule.loop_groups[group]):
                continue
            counter = self._counter(group, axis)
            terms += offset_terms(offset, self.schedule.loop_groups[group], sizes, counter)
            present[axis] = group
            masks += [mask] if (mask := self._mask(group, axis)) else []
        return terms, (present[0], present[1]), masks

    def _load(self, operand: Operand, node: Node, axes: Axes) -> MatrixValue:
        terms, value_axes, masks = self._tensor_terms(operand.accesses, node.strides, axes)
        if (operand, value_axes) in self._loaded:
            return self._loaded[operand, value_axes]
        number = self._load_counts.get(operand.source, 0)
        self._load_counts[operand.source] = number + 1
        name = f"x{operand.source}{f'at{number}' if number else ''}"
        address = " + ".join([f"p{operand.source}", *(terms or [ZERO_TENSOR])])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        text, dtype = f"tl.load({address}{mask})", compute_dtype(node.dtype)
        if node.dtype == "bool":
            text = f"{text} != 0"
        elif node.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        self.load_lines(f"{name} = {text}")
        self._loaded[operand, value_axes] = MatrixValue(Value(name, dtype), value_axes)
        return self._loaded[operand, value_axes]

    def _iota_value(self, operand: Operand, node: Node, axes: Axes) -> MatrixValue:
        terms, value_axes, _ = self._tensor_terms(operand.accesses, (1,), axes)
        if not loops_used(operand.accesses):
            terms.append(ZERO_TENSOR)  # a start alone is a Python number
        dtype = compute_dtype(node.dtype)
        text = f"({' + '.join(terms or [ZERO_TENSOR])}).to({TRITON_DTYPES[dtype]})"
        return MatrixValue(Value(counter_text(node, text), dtype), value_axes)

    def _random_counters(self, index: int, axes: Axes) -> Iterator[MatrixValue]:
        """The operands of a random tensor that select the random number of each element."""
        loop_groups = (self.schedule.rows, *self.schedule.loop_groups)
        accesses, sizes = self.mapping.accesses[index], self.mapping.loop_sizes
        for offset in counter_offsets(self.graph[index], accesses, sizes, loop_groups):
            terms, value_axes, _ = self._offset_terms(offset, frozenset(offset.strides), axes)
            yield MatrixValue(Value(" + ".join(terms or [ZERO_TENSOR]), "int32"), value_axes)

    def store(self, index: int) -> None:
        """Store an output; if several programs have the same result, the first of them does."""
        node, result = self.graph[index], self.values[index]
        loops = self.mapping.loops[index]
        axes = list(result.axes)
        for group in find_groups(loops, self.schedule.loop_groups):
            if group not in axes:
                axes[axes.index(None)] = group
        terms, _, masks = self._tensor_terms(
            self.mapping.accesses[index], node.strides, (axes[0], axes[1])
        )
        masks += missing_loop_masks(loops, self.schedule.rows, self.mapping.loop_sizes, "r")
        address = " + ".join([f"p{index}", *(terms or [ZERO_TENSOR])])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        self.lines(f"tl.store({address}, {to_storage(result.value.text, node.dtype)}{mask})")


def _union_axes(values: Iterable[MatrixValue]) -> Axes:
    """The axes of the values broadcast together."""
    axes: list[int | None] = [None, None]
    for value in values:
        for axis, group in enumerate(value.axes):
            axes[axis] = group if group is not None else axes[axis]
    return axes[0], axes[1]
