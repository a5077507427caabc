"""Loop mapping of a kernel: every value of a set of operators gets an index over common loops.

This is the index propagation of FusionStitching (arXiv:2009.10924) in one pass over all operators:
the axes of every value start as unknowns, each operator and view equates some of them, and the
axes that remain are the loops of the kernel.  Every value has one index in this loop space.  A set
of operators that would need a value at two indices cannot be one kernel.

Accesses through views: translate the index of a view into the index of the tensor below it.

A view moves no bytes, so no kernel materializes one: every reader of a view reads the tensor
below the chain of views at the corresponding index.

Unification of tensor axes: which axes of different tensors are the same loop of a kernel.

Every axis longer than 1 starts as an unknown.  An elementwise operator equates the axes of its
operands with its own.  A view equates two lists of axes, so (batch, heads * width) and
(batch, heads, width) split the combined axis into two.  The axes that remain are the loops of the
kernel, and every axis of a tensor is a list of loops, outermost first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nostall.fusion.codegen.expressions.reductions import check_template
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.shapes import Shape, contiguous_strides


class AxisMismatch(Exception):
    """Two lists of axes have no common factorization: (6, 4) viewed as (4, 6)."""


@dataclass(eq=False)
class Axis:
    """A loop of ``size`` iterations, or the product of its ``factors`` once they are known."""

    size: int
    factors: tuple[Axis, ...] = ()
    """The axes that replace this one, outermost first; () if it is a loop itself."""


AxisGroup = tuple[Axis, ...]
"""Loops that together index one axis of a tensor, outermost first; () for an axis of size 1."""


def new_axes(size: int) -> AxisGroup:
    """A new unknown axis of ``size``."""
    return () if size == 1 else (Axis(size),)


def factors(axes: Iterable[Axis]) -> AxisGroup:
    """The loops that ``axes`` consist of, with every known factorization expanded."""
    loops: list[Axis] = []
    for axis in axes:
        loops.extend(factors(axis.factors) if axis.factors else (axis,))
    return tuple(loops)


def unify(left: Iterable[Axis], right: Iterable[Axis]) -> None:
    """Make two lists of axes with the same product the same loops.

    Raises :class:`AxisMismatch` if they have no common factorization.  Axes that were unified
    until then stay unified.
    """
    left_rest, right_rest = list(factors(left)), list(factors(right))
    while left_rest and right_rest:
        a, b = left_rest.pop(), right_rest.pop()
        if a is b:
            continue
        if a.size == b.size:
            b.factors = (a,)
        elif a.size > b.size:
            left_rest.append(_split_axis(a, b.size))
            b.factors = (a.factors[-1],)
        else:
            right_rest.append(_split_axis(b, a.size))
            a.factors = (b.factors[-1],)
        # The axes that just got factors can occur in the rest of both lists.
        left_rest, right_rest = list(factors(left_rest)), list(factors(right_rest))
    if left_rest or right_rest:
        raise AxisMismatch


def _split_axis(axis: Axis, inner: int) -> Axis:
    """Split ``axis`` into an outer axis and an inner one of size ``inner``; returns the outer."""
    if axis.size % inner:
        raise AxisMismatch
    outer = Axis(axis.size // inner)
    axis.factors = (outer, Axis(inner))
    return outer


def regroup(axes: Iterable[Axis], sizes: Sequence[int]) -> list[AxisGroup]:
    """Partition the loops of ``axes`` into one group for each of ``sizes`` (the same product).

    Splits loops if necessary.  Raises :class:`AxisMismatch` if a size does not divide the loop
    that it would have to split.
    """
    rest = list(factors(axes))
    groups: list[AxisGroup] = []
    for size in reversed(sizes):
        group: list[Axis] = []
        missing = size
        while missing > 1:
            if not rest:
                raise AxisMismatch
            axis = rest.pop()
            if missing % axis.size:
                rest.append(_split_axis(axis, missing))
                axis = axis.factors[-1]
            group.append(axis)
            missing //= axis.size
        groups.append(tuple(reversed(group)))
    if rest:
        raise AxisMismatch
    return groups[::-1]


@dataclass(frozen=True)
class AccessDraft:
    """The index of one tensor axis before the loops are known: ``start + step * i``.

    ``i`` is the joint index of ``axes``.
    """

    axes: AxisGroup
    start: int = 0
    step: int = 1

    def covers_axis(self, size: int) -> bool:
        """Whether the access reads an axis of ``size`` completely and in order."""
        return math.prod(a.size for a in self.axes) == size and (self.start, self.step) == (0, 1)


AccessDrafts = tuple[AccessDraft, ...]


def resolve_views(graph: Graph, index: int, accesses: AccessDrafts) -> tuple[int, AccessDrafts]:
    """The node below the views of node ``index``, and its index if the view is at ``accesses``."""
    while graph[index].kind == "layout":
        node = graph[index]
        below = graph[node.inputs[0]]
        if node.op == "permute":
            by_axis = dict(zip(node.dims, accesses, strict=True))
            accesses = tuple(by_axis[axis] for axis in range(len(accesses)))
        elif node.op == "expand":
            aligned = accesses[len(accesses) - len(below.shape) :]
            accesses = tuple(
                access if size > 1 else AccessDraft(())
                for access, size in zip(aligned, below.shape, strict=True)
            )
        elif node.op == "slice":
            accesses = _access_below_slice(node, accesses)
        else:
            accesses = _access_below_view(node, below, accesses)
        index = below.index
    return index, accesses


def _access_below_slice(node: Node, accesses: AccessDrafts) -> AccessDrafts:
    dim, start, step = node["dim"], node["start"], node["step"]
    assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
    access = accesses[dim]
    sliced = AccessDraft(access.axes, start + step * access.start, step * access.step)
    return (*accesses[:dim], sliced, *accesses[dim + 1 :])


def _access_below_view(node: Node, below: Node, accesses: AccessDrafts) -> AccessDrafts:
    """The index below a reshape: runs of axes with equal products are regrouped."""
    above = [(s, access) for s, access in zip(node.shape, accesses, strict=True) if s > 1]
    below_sizes = [size for size in below.shape if size > 1]
    result: list[AccessDraft] = []
    i = j = 0
    while i < len(above):
        run, sizes = [above[i]], [below_sizes[j]]
        i, j = i + 1, j + 1
        while (above_product := math.prod(s for s, _ in run)) != (
            below_product := math.prod(sizes)
        ):
            if above_product < below_product:
                run.append(above[i])
                i += 1
            else:
                sizes.append(below_sizes[j])
                j += 1
        if len(run) == len(sizes) == 1:
            result.append(run[0][1])
            continue
        if not all(access.covers_axis(size) for size, access in run):
            merged = _merge_axes(run) if len(sizes) == 1 else None
            if merged is None:
                raise BadFusion(f"{node} is a view of a slice; put them into different kernels")
            result.append(merged)
            continue
        axes = [axis for _, access in run for axis in access.axes]
        result.extend(AccessDraft(group) for group in regroup(axes, sizes))
    remaining = iter(result)
    return tuple(next(remaining) if size > 1 else AccessDraft(()) for size in below.shape)


def _merge_axes(run: list[tuple[int, AccessDraft]]) -> AccessDraft | None:
    """One access to the axis that adjacent axes form, from (size, access) of each of them.

    None if the merged access has no constant step.  A slice that takes one of several adjacent
    matrices has one.
    """
    axes: AxisGroup = ()
    start, step, inner = 0, 0, 1
    for size, access in reversed(run):
        start += access.start * inner
        if access.axes:
            if axes and access.step * inner != step * math.prod(axis.size for axis in axes):
                return None
            step = step or access.step * inner
            axes = (*access.axes, *axes)
        inner *= size
    return AccessDraft(axes, start, step or 1)


Loops = tuple[int, ...]


@dataclass(frozen=True)
class AxisAccess:
    """The index of one tensor axis: ``start + step * i``, ``i`` the joint index of ``loops``."""

    loops: Loops
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Operand:
    """Operand of an operator: a node at an index."""

    source: int  # the node, below all views
    accesses: tuple[AxisAccess, ...] = ()  # one for each axis of the source


@dataclass(frozen=True)
class LoopMapping:
    """A set of operators over common loops.

    Loops are numbered in memory order, slowest first.
    """

    graph: Graph = field(repr=False)
    operators: tuple[int, ...]  # nodes, in graph order
    outputs: tuple[int, ...]  # operators that the kernel writes to memory
    loop_sizes: tuple[int, ...]
    accesses: dict[int, tuple[AxisAccess, ...]]  # of each operator, one for each axis of its value
    operands: dict[int, tuple[Operand, ...]]  # of each operator
    reduced_loops: dict[int, frozenset[int]]  # of each reduction and dot: the loops it removes

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """The loops that the value of each operator depends on."""
        return {index: loops_used(accesses) for index, accesses in self.accesses.items()}

    @cached_property
    def memory_operands(self) -> tuple[Operand, ...]:
        """The distinct operands that are read from memory, in order of first use."""
        operands = (o for i in self.operators for o in self.operands[i])
        return tuple(dict.fromkeys(o for o in operands if self.is_in_memory(o)))

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The nodes read from memory, in order of first use: the inputs of the kernel.

        The order depends on the pattern only, not on the node numbers of the inputs, so equal
        patterns have equal kernels.
        """
        return tuple(dict.fromkeys(operand.source for operand in self.memory_operands))

    def inputs_of(self, operators: Iterable[int]) -> tuple[int, ...]:
        """The inputs that any of ``operators`` reads."""
        reads = {o.source for i in operators for o in self.operands[i]}
        return tuple(index for index in self.inputs if index in reads)

    def is_in_memory(self, operand: Operand) -> bool:
        """Whether an operand is read from memory: not computed by this kernel, not a constant."""
        return operand.source not in self.accesses and self.graph[operand.source].kind != "constant"


def loops_used(accesses: Iterable[AxisAccess]) -> frozenset[int]:
    """The loops that an index depends on."""
    return frozenset(loop for access in accesses for loop in access.loops)


def map_pattern(graph: Graph, operators: Iterable[int]) -> LoopMapping:
    """Infer the loops of a set of operators.

    Raises :class:`BadFusion` with the reason if they cannot be one kernel.
    """
    pattern = tuple(sorted(set(operators)))
    for index in pattern:
        _check_operator(graph, graph[index])
    inference = _LoopInference(graph, pattern)
    try:
        inference.propagate()
    except AxisMismatch:
        raise BadFusion(
            f"operators {pattern} view the same values as axes without common factors; put the "
            "operators before and after the view into different kernels"
        ) from None
    inference.merge_loops()
    return inference.mapping()


def _check_operator(graph: Graph, node: Node) -> None:
    if node.kind not in COMPUTE:
        raise BadFusion(f"node {node} is {node.kind}; a kernel computes {', '.join(COMPUTE)}")
    for value in (node, *(graph[index] for index in node.inputs)):
        if value.dtype == "float64":
            raise BadFusion(f"{node}: kernels compute in fp32; leave float64 to PyTorch")
        if not value.elements:
            raise BadFusion(f"{node} reads or makes no elements; there is nothing to launch")
    check_template(node, [graph[graph.base(index)] for index in node.inputs])


class _LoopInference:
    """Infers the loops: accesses of values and operands over axes that get unified."""

    def __init__(self, graph: Graph, operators: tuple[int, ...]) -> None:
        self.graph = graph
        self.operators = operators
        self.value_axes = {i: tuple(new_axes(size) for size in graph[i].shape) for i in operators}
        self.operands: dict[int, list[tuple[int, AccessDrafts]]] = {}
        self.reduced_axes: dict[int, AxisGroup] = {}
        self.reduction_accesses: dict[int, AccessDrafts] = {}
        """Accesses of each reduction to its operand, above views.  Only these have the loop of a
        broadcast axis that is reduced."""

    # -- constraints of operators and views ------------------------------------------------------

    def propagate(self) -> None:
        """Unify the axes that operators and views equate."""
        for index in self.operators:
            node = self.graph[index]
            self.operands[index] = []
            for position, operand in enumerate(node.inputs):
                if node.kind == "dot":
                    above_views = self._dot_access(node, position)
                elif node.kind == "reduce":
                    above_views = self._reduction_access(node)
                else:
                    above_views = self._elementwise_access(node, operand)
                source, accesses = resolve_views(self.graph, operand, above_views)
                if source in self.value_axes:
                    self._unify_with_producer(node, source, accesses)
                self.operands[index].append((source, accesses))

    def _elementwise_access(self, node: Node, operand: int) -> AccessDrafts:
        """Accesses to an operand of an elementwise operator; axes of size 1 are broadcast."""
        shape = self.graph[operand].shape
        aligned = self.value_axes[node.index][len(node.shape) - len(shape) :]
        return tuple(
            AccessDraft(axes if size > 1 else ()) for axes, size in zip(aligned, shape, strict=True)
        )

    def _reduction_access(self, node: Node) -> AccessDrafts:
        """Accesses to the operand of a reduction: the kept axes, and new loops for removed ones."""
        kept_axes = iter(self.value_axes[node.index])
        accesses = []
        reduced: list[Axis] = []
        for dim, size in enumerate(self.graph[node.inputs[0]].shape):
            is_reduced = dim in node.dims
            axes = new_axes(size) if is_reduced else next(kept_axes)
            if is_reduced and node.keepdim:
                next(kept_axes)
            if is_reduced:
                reduced.extend(axes)
            accesses.append(AccessDraft(axes))
        self.reduced_axes[node.index] = tuple(reduced)
        self.reduction_accesses[node.index] = tuple(accesses)
        return tuple(accesses)

    def _dot_access(self, node: Node, position: int) -> AccessDrafts:
        """Accesses to the left (position 0) or right (1) factor of a dot: the batch, m or n, and k.

        The left factor comes first; it creates the loop k that both have.
        """
        *batch, m, n = self.value_axes[node.index]
        if position == 0:
            self.reduced_axes[node.index] = new_axes(self.graph[node.inputs[0]].shape[-1])
        k = self.reduced_axes[node.index]
        return tuple(map(AccessDraft, (*batch, m, k) if position == 0 else (*batch, k, n)))

    def _unify_with_producer(self, node: Node, source: int, accesses: AccessDrafts) -> None:
        """Unify the axes at which a value is read with those at which this kernel computes it."""
        for own, access, size in zip(
            self.value_axes[source], accesses, self.graph[source].shape, strict=True
        ):
            if not access.covers_axis(size):
                raise BadFusion(
                    f"{node} reads a part of %{source}, which the same kernel computes; put them "
                    "into different kernels"
                )
            unify(own, access.axes)

    # -- loops that no constraint connects -------------------------------------------------------

    def merge_loops(self) -> None:
        """Let values share loops that no constraint connects.

        Merged are, in this order: reads of the same memory at the same starts and steps,
        reductions of the same length, and values of the same shape.
        """
        reads = [
            (source, accesses)
            for operands in self.operands.values()
            for source, accesses in operands
            if source not in self.value_axes
        ]
        for at, (source, accesses) in enumerate(reads):
            for earlier_source, earlier_accesses in reads[:at]:
                if earlier_source == source and (
                    _starts_and_steps(accesses) == _starts_and_steps(earlier_accesses)
                ):
                    self._merge(_access_axes(earlier_accesses), _access_axes(accesses))
        reductions = list(self.reduced_axes.values())
        for at, later in enumerate(reductions):
            for earlier in reductions[:at]:
                self._merge(list(factors(earlier)), list(factors(later)))
        values = [
            [a for axes in groups for a in factors(axes)] for groups in self.value_axes.values()
        ]
        largest = max(values, key=lambda axes: math.prod(a.size for a in axes))
        for value in values:
            self._merge(list(factors(largest)), list(factors(value)))

    def _merge(self, left: list[Axis], right: list[Axis]) -> None:
        """Unify two lists of loops, unless a tensor would then be read along a diagonal."""
        # Most lists are identical already, because many operators read the same value.
        if left == right or [a.size for a in left] != [a.size for a in right]:
            return
        parent: dict[int, Axis] = {}

        def root(axis: Axis) -> Axis:
            while id(axis) in parent:
                axis = parent[id(axis)]
            return axis

        for a, b in zip(left, right, strict=True):
            if root(a) is not root(b):
                parent[id(root(b))] = root(a)
        for axes in self._axis_lists():
            if len({id(root(axis)) for axis in axes}) < len(axes):
                return
        for a, b in zip(left, right, strict=True):
            unify((a,), (b,))

    def _axis_lists(self) -> Iterator[AxisGroup]:
        """The loops of every value and of every operand."""
        for groups in self.value_axes.values():
            yield tuple(a for axes in groups for a in factors(axes))
        for operands in self.operands.values():
            for _, accesses in operands:
                yield tuple(_access_axes(accesses))
        for accesses in self.reduction_accesses.values():
            yield tuple(_access_axes(accesses))

    # -- the result ------------------------------------------------------------------------------

    def mapping(self) -> LoopMapping:
        """The mapping, with loops numbered in memory order."""
        order = self._memory_order()
        loop_numbers = {id(axis): at for at, axis in enumerate(order)}

        def loops(axes: AxisGroup) -> Loops:
            return tuple(loop_numbers[id(axis)] for axis in factors(axes))

        members = set(self.operators)
        graph = self.graph
        return LoopMapping(
            graph=graph,
            operators=self.operators,
            outputs=tuple(
                i
                for i in self.operators
                if i in graph.results or any(u not in members for u in graph.consumers[i])
            ),
            loop_sizes=tuple(axis.size for axis in order),
            accesses={
                i: tuple(AxisAccess(loops(axes)) for axes in groups)
                for i, groups in self.value_axes.items()
            },
            operands={
                i: tuple(
                    Operand(
                        source, tuple(AxisAccess(loops(a.axes), a.start, a.step) for a in accesses)
                    )
                    for source, accesses in operands
                )
                for i, operands in self.operands.items()
            },
            reduced_loops={i: frozenset(loops(axes)) for i, axes in self.reduced_axes.items()},
        )

    def _memory_order(self) -> list[Axis]:
        """All loops in the memory order of the largest tensor that has all of them, slowest first.

        Tensors in memory precede values that stay in registers.
        """
        all_axes = {id(a): a for axes in self._axis_lists() for a in axes}
        has_dots = any(self.graph[i].kind == "dot" for i in self.operators)
        orders: list[tuple[tuple[bool, int], list[Axis]]] = []
        for in_memory, node, strides, accesses in self._tensors():
            axes = _access_axes(accesses)
            if len({id(a) for a in axes}) < len(axes):
                raise BadFusion(
                    f"{node} would be read along a diagonal; put its readers into different kernels"
                )
            if has_dots or len(axes) == len(all_axes):
                orders.append(((in_memory, node.bytes), _axes_by_stride(strides, accesses)))
        orders.sort(key=lambda entry: entry[0], reverse=True)
        if has_dots:
            # No tensor has all loops: concatenate the orders of all tensors, the largest first.
            return list({id(axis): axis for _, axes in orders for axis in axes}.values())
        if not orders:
            raise BadFusion(
                f"no tensor of operators {self.operators} has all of their loops; make them "
                "separate kernels, or pack those"
            )
        return orders[0][1]

    def _tensors(self) -> Iterator[tuple[bool, Node, Shape, AccessDrafts]]:
        """Every tensor as (is in memory, node, strides, accesses)."""
        for index, groups in self.value_axes.items():
            node = self.graph[index]
            accesses = tuple(AccessDraft(axes) for axes in groups)
            yield index in self.graph.results, node, node.strides, accesses
        for operands in self.operands.values():
            for source, accesses in operands:
                node = self.graph[source]
                in_memory = source not in self.value_axes and node.kind != "constant"
                yield in_memory, node, node.strides, accesses
        for index, accesses in self.reduction_accesses.items():
            node = self.graph[self.graph[index].inputs[0]]
            yield False, node, contiguous_strides(node.shape), accesses


def _access_axes(accesses: AccessDrafts) -> list[Axis]:
    return [axis for access in accesses for axis in factors(access.axes)]


def _starts_and_steps(accesses: AccessDrafts) -> list[tuple[int, int]]:
    return [(access.start, access.step) for access in accesses]


def _axes_by_stride(strides: Shape, accesses: AccessDrafts) -> list[Axis]:
    """The loops of a tensor, the one with the largest stride first."""
    axis_strides: list[tuple[int, Axis]] = []
    for access, stride in zip(accesses, strides, strict=True):
        axes = factors(access.axes)
        for at, axis in enumerate(axes):
            inner = math.prod(inner_axis.size for inner_axis in axes[at + 1 :])
            axis_strides.append((stride * access.step * inner, axis))
    return [axis for _, axis in sorted(axis_strides, key=lambda pair: -pair[0])]
