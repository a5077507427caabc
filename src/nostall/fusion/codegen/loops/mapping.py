"""The loops of one kernel: every value of a set of operators gets an index over common loops.

This is FusionStitching's index propagation (arXiv:2009.10924) in one pass over all operators: the
axes of every value start unknown, each operator and view says which of them are the same loop, and
what is left over is the space that the kernel walks.  A value has one place in that space; a set of
operators in which a value would be needed at two places is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from nostall.fusion.codegen.expressions.templates import check_template
from nostall.fusion.codegen.loops.axes import (
    Axis,
    AxisGroup,
    AxisMismatch,
    factors,
    new_axes,
    unify,
)
from nostall.fusion.codegen.loops.views import AccessDraft, AccessDrafts, resolve_views
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.shapes import Shape, contiguous_strides

Loops = tuple[int, ...]


@dataclass(frozen=True)
class AxisAccess:
    """Where one axis of a tensor is read: ``start + step * i``, i counting through ``loops``."""

    loops: Loops
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Operand:
    """What an operator reads: node ``source``, at ``accesses`` (one for each axis of the source)."""

    source: int
    accesses: tuple[AxisAccess, ...] = ()


@dataclass(frozen=True)
class LoopMapping:
    """A set of operators over common loops, numbered by memory order, slowest first.

    ``accesses`` has an entry for each operator, ``operands`` for each of its operands, ``reduced_loops``
    for each reduction and dot the loops that it removes.
    """

    graph: Graph = field(repr=False)
    operators: tuple[int, ...]
    outputs: tuple[int, ...]
    loop_sizes: tuple[int, ...]
    accesses: dict[int, tuple[AxisAccess, ...]]
    operands: dict[int, tuple[Operand, ...]]
    reduced_loops: dict[int, frozenset[int]]

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """Of every operator the loops on which its value depends."""
        return {index: loops_used(places) for index, places in self.accesses.items()}

    @cached_property
    def memory_operands(self) -> tuple[Operand, ...]:
        """What is read from memory, each place once, in order of first use."""
        found = (o for i in self.operators for o in self.operands[i])
        return tuple(dict.fromkeys(o for o in found if self.is_in_memory(o)))

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The nodes read from memory, in order of first use: what the kernel takes, in its order
        (which is then that of equal patterns, wherever their inputs come from)."""
        return tuple(dict.fromkeys(operand.source for operand in self.memory_operands))

    def inputs_of(self, operators: Iterable[int]) -> tuple[int, ...]:
        """Those of the inputs that some of the operators read."""
        reads = {o.source for i in operators for o in self.operands[i]}
        return tuple(index for index in self.inputs if index in reads)

    def is_in_memory(self, operand: Operand) -> bool:
        """Whether an operand is in memory, neither computed here nor a constant."""
        return operand.source not in self.accesses and self.graph[operand.source].kind != "constant"


def loops_used(places: Iterable[AxisAccess]) -> frozenset[int]:
    """The loops on which a place in memory depends."""
    return frozenset(loop for place in places for loop in place.loops)


def map_pattern(graph: Graph, operators: Iterable[int]) -> LoopMapping:
    """The loops of a set of operators.

    Raises :class:`BadFusion` with the reason where they cannot be one kernel.
    """
    chosen = tuple(sorted(set(operators)))
    for index in chosen:
        _check_operator(graph, graph[index])
    drafts = _LoopInference(graph, chosen)
    try:
        drafts.propagate()
    except AxisMismatch:
        raise BadFusion(
            f"operators {chosen} look at the same values as axes without common factors; put what "
            "is before and what is after the view into different kernels"
        ) from None
    drafts.merge_loops()
    return drafts.mapping()


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
    """The propagation itself: places of values and of reads, made of axes not yet known."""

    def __init__(self, graph: Graph, operators: tuple[int, ...]) -> None:
        self.graph = graph
        self.operators = operators
        self.value_axes = {i: tuple(new_axes(size) for size in graph[i].shape) for i in operators}
        self.operands: dict[int, list[tuple[int, AccessDrafts]]] = {}
        self.reduced_axes: dict[int, AxisGroup] = {}
        self.reduction_accesses: dict[int, AccessDrafts] = {}
        """What reductions read, before views: a broadcast axis has its loop here only."""

    # -- what operators and views say ------------------------------------------------------------

    def propagate(self) -> None:
        for index in self.operators:
            node = self.graph[index]
            self.operands[index] = []
            for place, operand in enumerate(node.inputs):
                if node.kind == "dot":
                    seen = self._dot_access(node, place)
                elif node.kind == "reduce":
                    seen = self._reduction_access(node)
                else:
                    seen = self._elementwise_access(node, operand)
                source, places = resolve_views(self.graph, operand, seen)
                if source in self.value_axes:
                    self._unify_with_producer(node, source, places)
                self.operands[index].append((source, places))

    def _elementwise_access(self, node: Node, operand: int) -> AccessDrafts:
        """The operand of an elementwise operator; its axes of 1 are broadcast."""
        shape = self.graph[operand].shape
        aligned = self.value_axes[node.index][len(node.shape) - len(shape) :]
        return tuple(
            AccessDraft(row if size > 1 else ()) for row, size in zip(aligned, shape, strict=True)
        )

    def _reduction_access(self, node: Node) -> AccessDrafts:
        """The operand of a reduction: its kept axes, and new loops for those it removes."""
        kept = iter(self.value_axes[node.index])
        rows = []
        gone: list[Axis] = []
        for axis, size in enumerate(self.graph[node.inputs[0]].shape):
            removed = axis in node.dims
            row = new_axes(size) if removed else next(kept)
            if removed and node.keepdim:
                next(kept)
            if removed:
                gone.extend(row)
            rows.append(AccessDraft(row))
        self.reduced_axes[node.index] = tuple(gone)
        self.reduction_accesses[node.index] = tuple(rows)
        return tuple(rows)

    def _dot_access(self, node: Node, place: int) -> AccessDrafts:
        """A factor of a dot: its batch, its own axis, and a new loop for the common one."""
        *batch, m, n = self.value_axes[node.index]
        if place == 0:
            self.reduced_axes[node.index] = new_axes(self.graph[node.inputs[0]].shape[-1])
        k = self.reduced_axes[node.index]
        return tuple(map(AccessDraft, (*batch, m, k) if place == 0 else (*batch, k, n)))

    def _unify_with_producer(self, node: Node, source: int, places: AccessDrafts) -> None:
        """A value computed here is read where it is made."""
        for own, place, size in zip(
            self.value_axes[source], places, self.graph[source].shape, strict=True
        ):
            if not place.covers_axis(size):
                raise BadFusion(
                    f"{node} reads a part of %{source}, which the same kernel computes; put them "
                    "into different kernels"
                )
            unify(own, place.axes)

    # -- loops that nothing ties together --------------------------------------------------------

    def merge_loops(self) -> None:
        """Let values share loops where nothing says that they are different.

        First those that read the same memory at the same place, then reductions of the same
        length, then what is left of values of the same shape.
        """
        reads = [
            (source, places)
            for operands in self.operands.values()
            for source, places in operands
            if source not in self.value_axes
        ]
        for at, (source, places) in enumerate(reads):
            for other, elsewhere in reads[:at]:
                if other == source and _starts_and_steps(places) == _starts_and_steps(elsewhere):
                    self._merge(_access_axes(elsewhere), _access_axes(places))
        rows = list(self.reduced_axes.values())
        for at, later in enumerate(rows):
            for earlier in rows[:at]:
                self._merge(list(factors(earlier)), list(factors(later)))
        values = [[a for row in rows for a in factors(row)] for rows in self.value_axes.values()]
        widest = max(values, key=lambda row: math.prod(a.size for a in row))
        for value in values:
            self._merge(list(factors(widest)), list(factors(value)))

    def _merge(self, left: list[Axis], right: list[Axis]) -> None:
        """Unify two rows of loops unless some value would then be on a diagonal."""
        # Most rows are the same loops already: those of a value that many operators read.
        if left == right or [a.size for a in left] != [a.size for a in right]:
            return
        same: dict[int, Axis] = {}

        def root(axis: Axis) -> Axis:
            while id(axis) in same:
                axis = same[id(axis)]
            return axis

        for one, two in zip(left, right, strict=True):
            if root(one) is not root(two):
                same[id(root(two))] = root(one)
        for row in self._axis_lists():
            if len({id(root(axis)) for axis in row}) < len(row):
                return
        for one, two in zip(left, right, strict=True):
            unify((one,), (two,))

    def _axis_lists(self) -> Iterator[AxisGroup]:
        """The loops of every value and of every read."""
        for rows in self.value_axes.values():
            yield tuple(a for row in rows for a in factors(row))
        for operands in self.operands.values():
            for _, places in operands:
                yield tuple(_access_axes(places))
        for places in self.reduction_accesses.values():
            yield tuple(_access_axes(places))

    # -- the result ------------------------------------------------------------------------------

    def mapping(self) -> LoopMapping:
        order = self._memory_order()
        number = {id(axis): at for at, axis in enumerate(order)}

        def loops(row: AxisGroup) -> Loops:
            return tuple(number[id(axis)] for axis in factors(row))

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
                i: tuple(AxisAccess(loops(row)) for row in rows)
                for i, rows in self.value_axes.items()
            },
            operands={
                i: tuple(
                    Operand(
                        source, tuple(AxisAccess(loops(p.axes), p.start, p.step) for p in places)
                    )
                    for source, places in operands
                )
                for i, operands in self.operands.items()
            },
            reduced_loops={i: frozenset(loops(row)) for i, row in self.reduced_axes.items()},
        )

    def _memory_order(self) -> list[Axis]:
        """All loops, as they lie in the largest tensor that has all of them, slowest first."""
        everything = {id(a): a for row in self._axis_lists() for a in row}
        dots = any(self.graph[i].kind == "dot" for i in self.operators)
        found: list[tuple[tuple[bool, int], list[Axis]]] = []
        for in_memory, node, strides, places in self._tensors():
            row = _access_axes(places)
            if len({id(a) for a in row}) < len(row):
                raise BadFusion(
                    f"{node} would be read along a diagonal; put its readers into different kernels"
                )
            if dots or len(row) == len(everything):
                found.append(((in_memory, node.bytes), _axes_by_stride(strides, places)))
        found.sort(key=lambda entry: entry[0], reverse=True)
        if dots:
            # No tensor has all loops: those of the largest first, each tensor's as they lie.
            return list({id(axis): axis for _, row in found for axis in row}.values())
        if not found:
            raise BadFusion(
                f"operators {self.operators} have no common space of loops; make them separate "
                "kernels, or pack those"
            )
        return found[0][1]

    def _tensors(self) -> Iterator[tuple[bool, Node, Shape, AccessDrafts]]:
        """Every tensor with its places: whether it is in memory, the node, the strides."""
        for index, rows in self.value_axes.items():
            node = self.graph[index]
            places = tuple(AccessDraft(row) for row in rows)
            yield index in self.graph.results, node, node.strides, places
        for operands in self.operands.values():
            for source, places in operands:
                node = self.graph[source]
                in_memory = source not in self.value_axes and node.kind != "constant"
                yield in_memory, node, node.strides, places
        for index, places in self.reduction_accesses.items():
            node = self.graph[self.graph[index].inputs[0]]
            yield False, node, contiguous_strides(node.shape), places


def _access_axes(places: AccessDrafts) -> list[Axis]:
    return [axis for place in places for axis in factors(place.axes)]


def _starts_and_steps(places: AccessDrafts) -> list[tuple[int, int]]:
    return [(place.start, place.step) for place in places]


def _axes_by_stride(strides: Shape, places: AccessDrafts) -> list[Axis]:
    """The loops of a tensor, the one with the longest step in memory first."""
    weighed: list[tuple[int, Axis]] = []
    for place, stride in zip(places, strides, strict=True):
        row = factors(place.axes)
        for at, axis in enumerate(row):
            inner = math.prod(other.size for other in row[at + 1 :])
            weighed.append((stride * place.step * inner, axis))
    return [axis for _, axis in sorted(weighed, key=lambda pair: -pair[0])]
