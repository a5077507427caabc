"""The body of a kernel with small batched dots: one element of the batch, matrix by matrix.

Every value is a tensor of two axes; which group of loops an axis counts through is said for each
value (:mod:`nostall.fusion.codegen.loops.dot_axes`).  Dots of three long axes are ``tl.dot``, others are
sums of products.  Lanes beyond the end of a group hold anything: dots and reductions clear them.
All that is read stands first: it is on its way while warps wait for each other's factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nostall.fusion.codegen.emit.philox import counted
from nostall.fusion.codegen.emit.prologue import row_block
from nostall.fusion.codegen.expressions.index_width import from_steps
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.expressions.softmax import template
from nostall.fusion.codegen.expressions.templates import (
    TRITON_DTYPES,
    Value,
    computed,
    constant,
    expression,
    reduction,
    stored,
    tensor,
)
from nostall.fusion.codegen.loops.addresses import ZERO, Offset, first_of_missing, offset, terms
from nostall.fusion.codegen.loops.dot_axes import groups_of, sides
from nostall.fusion.codegen.loops.mapping import Operand, Place, used
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.tile_sizes import matrix_widths
from nostall.fusion.graph.dynamic_size import Extent
from nostall.fusion.graph.graph import Node

Axes = tuple[int | None, int | None]
"""The group that each axis of a tensor counts through; None where it is 1."""

TENSOR_CORE_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class Laid:
    """A value and its axes."""

    value: Value
    axes: Axes = (None, None)


def write_matrices(of: Schedule, plan: KernelPlan, lines: Lines) -> int:
    """The body for the element number ``pid`` of the batch; returns how many there are."""
    row_block(of, plan, lines, "pid")
    computing = Lines()
    matrices = Matrices(of, lines, computing)
    for index in of.mapping.operators:
        computing(f"# {of.mapping.graph.describe(index)}")
        matrices.compute(index)
        if index in of.mapping.outputs:
            matrices.store(index)
    lines.add(computing)
    return Extent(of.row_count)


class Matrices:
    """Writes the values of one element of the batch; every value once, turned where needed."""

    def __init__(self, of: Schedule, reading: Lines, computing: Lines) -> None:
        self.of, self.mapping, self.graph = of, of.mapping, of.mapping.graph
        self.reading, self.lines = reading, computing
        self.widths = matrix_widths(of)
        self.made: dict[int, Laid] = {}
        self._turned: dict[int, Laid] = {}
        self._read: dict[tuple[Operand, Axes], Laid] = {}
        self._names: dict[int, int] = {}
        self._counters: dict[tuple[int, int], str | None] = {}

    # -- operators -------------------------------------------------------------------------------

    def compute(self, index: int) -> None:
        node = self.graph[index]
        if node.kind == "dot":
            laid = self._dot(index)
        elif node.kind == "reduce":
            laid = self._reduced(index)
        else:
            laid = self._elementwise(index)
        self.lines(f"v{index} = {laid.value.text}")
        self.made[index] = Laid(Value(f"v{index}", laid.value.dtype), laid.axes)

    def _elementwise(self, index: int) -> Laid:
        node, operands = self.graph[index], self.mapping.operands[index]
        axes = self._axes(groups_of(self.mapping.loops[index], self.of.groups), operands)
        given = [self._operand(operand, axes) for operand in operands]
        if node.op == "random":
            given += self._counted(index, axes)
        softmax = template(self.graph, index)
        return Laid(expression(node, [one.value for one in given], softmax), _union(given))

    def _reduced(self, index: int) -> Laid:
        how = reduction(self.graph[index])
        taken, removed = self._taken(index), self._removed(index)
        text, left = taken.value.text, list(taken.axes)
        for axis, group in enumerate(taken.axes):
            if group in removed:
                text, left[axis] = how.along(text, axis), None
        return Laid(how.result(text), (left[0], left[1]))

    def _taken(self, index: int) -> Laid:
        """What a reduction takes, along all that it removes, neutral beyond the end."""
        how = reduction(self.graph[index])
        (operand,) = self.mapping.operands[index]
        removed = self._removed(index)
        kept = groups_of(self.mapping.loops[index], self.of.groups)
        axes = self._axes((*kept, *removed), (operand,))
        given = self._operand(operand, axes)
        text = self._spread(how.partial(given.value), given.axes, axes, removed)
        has = list(_union([given]))
        for axis, group in enumerate(axes):
            if group in removed:
                has[axis] = group
                if mask := self._mask(group, axis):
                    text = f"tl.where({mask}, {text}, {how.neutral})"
        return Laid(Value(text, how.dtype), (has[0], has[1]))

    def _removed(self, index: int) -> tuple[int, ...]:
        return groups_of(self.mapping.reduced[index], self.of.groups)

    def _dot(self, index: int) -> Laid:
        m, n, k = (self._only(side) for side in sides(self.mapping, index))
        left, right = self.mapping.operands[index]
        if m is None or n is None or k is None:
            return self._sum_of_products(index, k)
        one, two = self._factor(left, (m, k), 1), self._factor(right, (k, n), 0)
        dtypes = {self.graph[i].dtype for i in self.graph[index].inputs}
        (dtype,) = dtypes if len(dtypes) == 1 else ("float32",)
        if dtype in TENSOR_CORE_DTYPES:
            kind = TRITON_DTYPES[dtype]
            return Laid(Value(f"tl.dot({one}.to({kind}), {two}.to({kind}))", "float32"), (m, n))
        return Laid(Value(f'tl.dot({one}, {two}, input_precision="ieee")', "float32"), (m, n))

    def _factor(self, operand: Operand, axes: Axes, common: int) -> str:
        """A factor of ``tl.dot`` as a whole matrix, 0 beyond the end of its ``common`` axis."""
        given = self._operand(operand, axes)
        text = tensor(given.value, "float32")
        text = self._spread(text, given.axes, axes, axes)
        group = axes[common]
        assert group is not None
        mask = self._mask(group, common)
        return f"tl.where({mask}, {text}, 0.0)" if mask else text

    def _sum_of_products(self, index: int, k: int | None) -> Laid:
        """A dot with an axis of 1: a matrix times a vector, or less."""
        products = self._products(index, k)
        if k is None:
            return products
        axis = products.axes.index(k)
        left = (None, products.axes[1]) if axis == 0 else (products.axes[0], None)
        text = f"tl.sum({products.value.text}, {axis}, keep_dims=True)"
        return Laid(Value(text, "float32"), left)

    def _products(self, index: int, k: int | None) -> Laid:
        """What such a dot adds up, along all of ``k``, 0 beyond its end."""
        operands = self.mapping.operands[index]
        loops = self.mapping.loops[index] | self.mapping.reduced[index]
        axes = self._axes(groups_of(loops, self.of.groups), operands)
        given = [self._operand(operand, axes) for operand in operands]
        one, two = (tensor(g.value, "float32") for g in given)
        text, union = f"{one} * {two}", _union(given)
        if k is None:
            return Laid(Value(text, "float32"), union)
        axis = axes.index(k)
        text = self._spread(f"({text})", union, axes, (k,))
        if mask := self._mask(k, axis):
            text = f"tl.where({mask}, {text}, 0.0)"
        has = (k, union[1]) if axis == 0 else (union[0], k)
        return Laid(Value(text, "float32"), has)

    def _only(self, side: frozenset[int]) -> int | None:
        found = groups_of(side, self.of.groups)
        return found[0] if found else None

    # -- axes ------------------------------------------------------------------------------------

    def _axes(self, groups: Iterable[int], operands: Iterable[Operand]) -> Axes:
        """Where groups lie: as in the operand that was made here, else as the memory does."""
        waiting = list(dict.fromkeys(groups))
        found: list[int | None] = [None, None]
        for operand in sorted(operands, key=self._weight, reverse=True):
            for axis, group in enumerate(self._lies(operand)):
                if group in waiting and found[axis] is None:
                    found[axis] = group
                    waiting.remove(group)
        for group in waiting:
            found[1 if found[1] is None else 0] = group
        return found[0], found[1]

    def _weight(self, operand: Operand) -> tuple[bool, int]:
        inside = operand.source in self.made
        groups = self._lies(operand)
        return inside, sum(group is not None for group in groups)

    def _lies(self, operand: Operand) -> Axes:
        """Axes of an operand as it is: made here, or in memory with the shortest step last."""
        if operand.source in self.made:
            return self.made[operand.source].axes
        node = self.graph[operand.source]
        if node.kind == "constant":
            return None, None
        weights = offset(operand.places, node.strides, self.mapping.sizes).weights
        found = groups_of(used(operand.places), self.of.groups)
        steps = {at: min(weights.get(loop, 1 << 62) for loop in self.of.groups[at]) for at in found}
        order = sorted(found, key=lambda at: -steps[at])
        return (order[0] if len(order) > 1 else None, order[-1] if order else None)

    def _spread(self, text: str, has: Axes, axes: Axes, groups: Iterable[int | None]) -> str:
        """A text that has all of ``groups`` as long axes."""
        if all(has[axis] == g for axis, g in enumerate(axes) if g is not None and g in groups):
            return text
        shape = ", ".join("1" if g is None else str(self.widths[g]) for g in axes)
        return f"tl.broadcast_to({text}, ({shape}))"

    def _counter(self, group: int, axis: int) -> str:
        """The place along an axis, as a tensor."""
        name = f"{'ij'[axis]}{group}"
        if (group, axis) not in self._counters:
            width, size = self.widths[group], self.of.count(self.of.groups[group])
            shape = ("[:, None]", "[None, :]")[axis]
            self.reading(f"{name} = tl.arange(0, {width}){shape}")
            mask = f"in_{name}" if size < width else None
            if mask:
                self.reading(f"{mask} = {name} < {size}")
            self._counters[group, axis] = mask
        return name

    def _mask(self, group: int, axis: int) -> str | None:
        self._counter(group, axis)
        return self._counters[group, axis]

    # -- values ----------------------------------------------------------------------------------

    def _operand(self, operand: Operand, axes: Axes) -> Laid:
        """A value whose groups lie where ``axes`` has them."""
        node = self.graph[operand.source]
        if node.op == "iota":
            return self._iota(operand, node, axes)
        if node.kind == "constant":
            return Laid(constant(node))
        if operand.source not in self.made:
            return self._load(operand, node, axes)
        laid = self.made[operand.source]
        if all(group in (None, axes[axis]) for axis, group in enumerate(laid.axes)):
            return laid
        if operand.source not in self._turned:
            name = f"t{operand.source}"
            self.lines(f"{name} = tl.trans({laid.value.text})")
            turned = Laid(Value(name, laid.value.dtype), laid.axes[::-1])
            self._turned[operand.source] = turned
        return self._turned[operand.source]

    def _terms(
        self, places: tuple[Place, ...], strides: tuple[int, ...], axes: Axes
    ) -> tuple[list[str], Axes, list[str]]:
        """What is added to an address, the axes that has, and the masks of those."""
        return self._added(offset(places, strides, self.mapping.sizes), used(places), axes)

    def _added(
        self, where: Offset, loops: frozenset[int], axes: Axes
    ) -> tuple[list[str], Axes, list[str]]:
        sizes = self.mapping.sizes
        found = [str(where.start)] if where.start else []
        found += terms(where, self.of.rows, sizes, "r")
        has: list[int | None] = [None, None]
        masks = []
        for axis, group in enumerate(axes):
            if group is None or not loops & set(self.of.groups[group]):
                continue
            counter = self._counter(group, axis)
            found += terms(where, self.of.groups[group], sizes, counter)
            has[axis] = group
            masks += [mask] if (mask := self._mask(group, axis)) else []
        return found, (has[0], has[1]), masks

    def _load(self, operand: Operand, node: Node, axes: Axes) -> Laid:
        added, has, masks = self._terms(operand.places, node.strides, axes)
        if (operand, has) in self._read:
            return self._read[operand, has]
        number = self._names.get(operand.source, 0)
        self._names[operand.source] = number + 1
        name = f"x{operand.source}{f'at{number}' if number else ''}"
        address = " + ".join([f"p{operand.source}", *(added or [ZERO])])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        text, dtype = f"tl.load({address}{mask})", computed(node.dtype)
        if node.dtype == "bool":
            text = f"{text} != 0"
        elif node.dtype != dtype:
            text = f"{text}.to({TRITON_DTYPES[dtype]})"
        self.reading(f"{name} = {text}")
        self._read[operand, has] = Laid(Value(name, dtype), has)
        return self._read[operand, has]

    def _iota(self, operand: Operand, node: Node, axes: Axes) -> Laid:
        added, has, _ = self._terms(operand.places, (1,), axes)
        dtype = computed(node.dtype)
        text = f"({' + '.join(added or [ZERO])}).to({TRITON_DTYPES[dtype]})"
        return Laid(Value(from_steps(node, text), dtype), has)

    def _counted(self, index: int, axes: Axes) -> Iterator[Laid]:
        """What says which random number each element takes."""
        sides = (self.of.rows, *self.of.groups)
        places, sizes = self.mapping.places[index], self.mapping.sizes
        for where in counted(self.graph[index], places, sizes, sides):
            added, has, _ = self._added(where, frozenset(where.weights), axes)
            yield Laid(Value(" + ".join(added or [ZERO]), "int32"), has)

    def store(self, index: int) -> None:
        """Write an output to memory; of equal results in several programs the first one."""
        node, laid = self.graph[index], self.made[index]
        loops = self.mapping.loops[index]
        axes = list(laid.axes)
        for group in groups_of(loops, self.of.groups):
            if group not in axes:
                axes[axes.index(None)] = group
        added, _, masks = self._terms(self.mapping.places[index], node.strides, (axes[0], axes[1]))
        masks += first_of_missing(loops, self.of.rows, self.mapping.sizes, "r")
        address = " + ".join([f"p{index}", *(added or [ZERO])])
        mask = f", mask={' & '.join(masks)}" if masks else ""
        self.lines(f"tl.store({address}, {stored(laid.value.text, node.dtype)}{mask})")


def _union(given: Iterable[Laid]) -> Axes:
    """The axes that some of the values have."""
    found: list[int | None] = [None, None]
    for one in given:
        for axis, group in enumerate(one.axes):
            found[axis] = group if group is not None else found[axis]
    return found[0], found[1]
