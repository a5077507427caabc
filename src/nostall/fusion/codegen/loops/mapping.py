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
from nostall.fusion.codegen.loops.axes import Axis, Mismatch, Row, fresh, leaves, unify
from nostall.fusion.codegen.loops.views import Draft, Drafted, through
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.shapes import Shape, contiguous_strides

Loops = tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where one axis of a tensor is read: ``start + step * i``, i counting through ``loops``."""

    loops: Loops
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Operand:
    """What an operator reads: node ``source``, at ``places`` (one for each axis of the source)."""

    source: int
    places: tuple[Place, ...] = ()


@dataclass(frozen=True)
class Mapping:
    """A set of operators over common loops, numbered by memory order, slowest first.

    ``places`` has an entry for each operator, ``operands`` for each of its operands, ``reduced``
    for each reduction and dot the loops that it removes.
    """

    graph: Graph = field(repr=False)
    operators: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    places: dict[int, tuple[Place, ...]]
    operands: dict[int, tuple[Operand, ...]]
    reduced: dict[int, frozenset[int]]

    @cached_property
    def loops(self) -> dict[int, frozenset[int]]:
        """Of every operator the loops on which its value depends."""
        return {index: used(places) for index, places in self.places.items()}

    @cached_property
    def reads(self) -> tuple[Operand, ...]:
        """What is read from memory, each place once, in order of first use."""
        found = (o for i in self.operators for o in self.operands[i])
        return tuple(dict.fromkeys(o for o in found if self.is_outside(o)))

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The nodes read from memory, in order of first use: what the kernel takes, in its order
        (which is then that of equal patterns, wherever their inputs come from)."""
        return tuple(dict.fromkeys(operand.source for operand in self.reads))

    def read_by(self, operators: Iterable[int]) -> tuple[int, ...]:
        """Those of the inputs that some of the operators read."""
        reads = {o.source for i in operators for o in self.operands[i]}
        return tuple(index for index in self.inputs if index in reads)

    def is_outside(self, operand: Operand) -> bool:
        """Whether an operand is in memory, neither computed here nor a constant."""
        return operand.source not in self.places and self.graph[operand.source].kind != "constant"


def used(places: Iterable[Place]) -> frozenset[int]:
    """The loops on which a place in memory depends."""
    return frozenset(loop for place in places for loop in place.loops)


def map_pattern(graph: Graph, operators: Iterable[int]) -> Mapping:
    """The loops of a set of operators.

    Raises :class:`BadFusion` with the reason where they cannot be one kernel.
    """
    chosen = tuple(sorted(set(operators)))
    for index in chosen:
        _check(graph, graph[index])
    drafts = _Drafts(graph, chosen)
    try:
        drafts.propagate()
    except Mismatch:
        raise BadFusion(
            f"operators {chosen} look at the same values as axes without common factors; put what "
            "is before and what is after the view into different kernels"
        ) from None
    drafts.join()
    return drafts.settled()


def _check(graph: Graph, node: Node) -> None:
    if node.kind not in COMPUTE:
        raise BadFusion(f"node {node} is {node.kind}; a kernel computes {', '.join(COMPUTE)}")
    for value in (node, *(graph[index] for index in node.inputs)):
        if value.dtype == "float64":
            raise BadFusion(f"{node}: kernels compute in fp32; leave float64 to PyTorch")
        if not value.elements:
            raise BadFusion(f"{node} reads or makes no elements; there is nothing to launch")
    check_template(node, [graph[graph.base(index)] for index in node.inputs])


class _Drafts:
    """The propagation itself: places of values and of reads, made of axes not yet known."""

    def __init__(self, graph: Graph, operators: tuple[int, ...]) -> None:
        self.graph = graph
        self.operators = operators
        self.own = {i: tuple(fresh(size) for size in graph[i].shape) for i in operators}
        self.operands: dict[int, list[tuple[int, Drafted]]] = {}
        self.reduced: dict[int, Row] = {}
        self.seen: dict[int, Drafted] = {}
        """What reductions read, before views: a broadcast axis has its loop here only."""

    # -- what operators and views say ------------------------------------------------------------

    def propagate(self) -> None:
        for index in self.operators:
            node = self.graph[index]
            self.operands[index] = []
            for place, operand in enumerate(node.inputs):
                if node.kind == "dot":
                    seen = self._factor(node, place)
                elif node.kind == "reduce":
                    seen = self._reduction(node)
                else:
                    seen = self._spread(node, operand)
                source, places = through(self.graph, operand, seen)
                if source in self.own:
                    self._agree(node, source, places)
                self.operands[index].append((source, places))

    def _spread(self, node: Node, operand: int) -> Drafted:
        """The operand of an elementwise operator; its axes of 1 are broadcast."""
        shape = self.graph[operand].shape
        aligned = self.own[node.index][len(node.shape) - len(shape) :]
        return tuple(
            Draft(row if size > 1 else ()) for row, size in zip(aligned, shape, strict=True)
        )

    def _reduction(self, node: Node) -> Drafted:
        """The operand of a reduction: its kept axes, and new loops for those it removes."""
        kept = iter(self.own[node.index])
        rows = []
        gone: list[Axis] = []
        for axis, size in enumerate(self.graph[node.inputs[0]].shape):
            removed = axis in node.dims
            row = fresh(size) if removed else next(kept)
            if removed and node.keepdim:
                next(kept)
            if removed:
                gone.extend(row)
            rows.append(Draft(row))
        self.reduced[node.index] = tuple(gone)
        self.seen[node.index] = tuple(rows)
        return tuple(rows)

    def _factor(self, node: Node, place: int) -> Drafted:
        """A factor of a dot: its batch, its own axis, and a new loop for the common one."""
        *batch, m, n = self.own[node.index]
        if place == 0:
            self.reduced[node.index] = fresh(self.graph[node.inputs[0]].shape[-1])
        k = self.reduced[node.index]
        return tuple(map(Draft, (*batch, m, k) if place == 0 else (*batch, k, n)))

    def _agree(self, node: Node, source: int, places: Drafted) -> None:
        """A value computed here is read where it is made."""
        for own, place, size in zip(
            self.own[source], places, self.graph[source].shape, strict=True
        ):
            if not place.covers(size):
                raise BadFusion(
                    f"{node} reads a part of %{source}, which the same kernel computes; put them "
                    "into different kernels"
                )
            unify(own, place.row)

    # -- loops that nothing ties together --------------------------------------------------------

    def join(self) -> None:
        """Let values share loops where nothing says that they are different.

        First those that read the same memory at the same place, then reductions of the same
        length, then what is left of values of the same shape.
        """
        reads = [
            (source, places)
            for operands in self.operands.values()
            for source, places in operands
            if source not in self.own
        ]
        for at, (source, places) in enumerate(reads):
            for other, elsewhere in reads[:at]:
                if other == source and _steps(places) == _steps(elsewhere):
                    self._join(_loops(elsewhere), _loops(places))
        rows = list(self.reduced.values())
        for at, later in enumerate(rows):
            for earlier in rows[:at]:
                self._join(list(leaves(earlier)), list(leaves(later)))
        values = [[a for row in rows for a in leaves(row)] for rows in self.own.values()]
        widest = max(values, key=lambda row: math.prod(a.size for a in row))
        for value in values:
            self._join(list(leaves(widest)), list(leaves(value)))

    def _join(self, left: list[Axis], right: list[Axis]) -> None:
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
        for row in self._rows():
            if len({id(root(axis)) for axis in row}) < len(row):
                return
        for one, two in zip(left, right, strict=True):
            unify((one,), (two,))

    def _rows(self) -> Iterator[Row]:
        """The loops of every value and of every read."""
        for rows in self.own.values():
            yield tuple(a for row in rows for a in leaves(row))
        for operands in self.operands.values():
            for _, places in operands:
                yield tuple(_loops(places))
        for places in self.seen.values():
            yield tuple(_loops(places))

    # -- the result ------------------------------------------------------------------------------

    def settled(self) -> Mapping:
        order = self._order()
        number = {id(axis): at for at, axis in enumerate(order)}

        def loops(row: Row) -> Loops:
            return tuple(number[id(axis)] for axis in leaves(row))

        members = set(self.operators)
        graph = self.graph
        return Mapping(
            graph=graph,
            operators=self.operators,
            outputs=tuple(
                i
                for i in self.operators
                if i in graph.results or any(u not in members for u in graph.consumers[i])
            ),
            sizes=tuple(axis.size for axis in order),
            places={i: tuple(Place(loops(row)) for row in rows) for i, rows in self.own.items()},
            operands={
                i: tuple(
                    Operand(source, tuple(Place(loops(p.row), p.start, p.step) for p in places))
                    for source, places in operands
                )
                for i, operands in self.operands.items()
            },
            reduced={i: frozenset(loops(row)) for i, row in self.reduced.items()},
        )

    def _order(self) -> list[Axis]:
        """All loops, as they lie in the largest tensor that has all of them, slowest first."""
        everything = {id(a): a for row in self._rows() for a in row}
        dots = any(self.graph[i].kind == "dot" for i in self.operators)
        found: list[tuple[tuple[bool, int], list[Axis]]] = []
        for in_memory, node, strides, places in self._tensors():
            row = _loops(places)
            if len({id(a) for a in row}) < len(row):
                raise BadFusion(
                    f"{node} would be read along a diagonal; put its readers into different kernels"
                )
            if dots or len(row) == len(everything):
                found.append(((in_memory, node.bytes), _by_stride(strides, places)))
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

    def _tensors(self) -> Iterator[tuple[bool, Node, Shape, Drafted]]:
        """Every tensor with its places: whether it is in memory, the node, the strides."""
        for index, rows in self.own.items():
            node = self.graph[index]
            places = tuple(Draft(row) for row in rows)
            yield index in self.graph.results, node, node.strides, places
        for operands in self.operands.values():
            for source, places in operands:
                node = self.graph[source]
                in_memory = source not in self.own and node.kind != "constant"
                yield in_memory, node, node.strides, places
        for index, places in self.seen.items():
            node = self.graph[self.graph[index].inputs[0]]
            yield False, node, contiguous_strides(node.shape), places


def _loops(places: Drafted) -> list[Axis]:
    return [axis for place in places for axis in leaves(place.row)]


def _steps(places: Drafted) -> list[tuple[int, int]]:
    return [(place.start, place.step) for place in places]


def _by_stride(strides: Shape, places: Drafted) -> list[Axis]:
    """The loops of a tensor, the one with the longest step in memory first."""
    weighed: list[tuple[int, Axis]] = []
    for place, stride in zip(places, strides, strict=True):
        row = leaves(place.row)
        for at, axis in enumerate(row):
            inner = math.prod(other.size for other in row[at + 1 :])
            weighed.append((stride * place.step * inner, axis))
    return [axis for _, axis in sorted(weighed, key=lambda pair: -pair[0])]
