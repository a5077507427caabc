"""An operator graph: what a kernel may compute, without saying which kernel computes it.

Nodes stand in topological order and are named by their index.  Views cost nothing in PyTorch, so
they and constants belong to no kernel: each kernel that needs one carries it.  What fusion decides
about are the *operators* (elementwise, reductions, small dots); *opaque* nodes are borders.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from nostall.fusion.errors import BadGraph
from nostall.fusion.graph.dynamic_size import is_stand_in, resized, varies
from nostall.fusion.graph.operations import (
    COMPARISONS,
    COMPUTE,
    DTYPE_BYTES,
    OPERATIONS,
    Attribute,
    Kind,
)
from nostall.fusion.graph.shapes import Shape, contiguous, result_shape

MOST_ELEMENTS = 2**31 - 1
"""Kernels count elements in 32 bits."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value.  ``inputs`` are indices of earlier nodes, ``strides`` count elements and say how
    the value lies in memory where it is an input or written by a kernel; ``attributes`` are
    sorted by name and are those of its row in :data:`~nostall.fusion.graph.operations.OPERATIONS`."""

    index: int
    op: str
    inputs: tuple[int, ...]
    shape: Shape
    dtype: str
    strides: Shape
    attributes: tuple[tuple[str, Attribute], ...] = ()

    @property
    def kind(self) -> Kind:
        return OPERATIONS[self.op].kind

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the value where it is written whole; 0 for what only an opaque node reads."""
        return self.elements * DTYPE_BYTES.get(self.dtype, 0)

    @property
    def contiguous(self) -> bool:
        return self.strides == contiguous(self.shape)

    def __getitem__(self, name: str) -> Attribute:
        for key, value in self.attributes:
            if key == name:
                return value
        raise KeyError(name)

    @property
    def dims(self) -> tuple[int, ...]:
        """Axes that a reduction removes, or the order of a permutation."""
        value = self["dims"]
        assert isinstance(value, tuple)
        return value

    @property
    def keepdim(self) -> bool:
        return bool(self["keepdim"])

    def at(self, varying: int | None, size: int | None) -> Node:
        """The node of a graph made with ``varying``, where that is ``size``."""
        if varying is None or size is None:
            return self
        shape, strides = (
            tuple(resized(number, varying, size) for number in numbers)
            for numbers in (self.shape, self.strides)
        )
        return replace(self, shape=shape, strides=strides)

    def __str__(self) -> str:
        return self.told()

    def told(self, varying: int | None = None) -> str:
        """As text; ``n`` is the size that varies."""
        given = [f"%{i}" for i in self.inputs] + [f"{k}={v}" for k, v in self.attributes]
        sizes = "x".join(_told(size, varying) for size in self.shape) or "scalar"
        return f"%{self.index} = {self.op}({', '.join(given)}) {self.dtype} {sizes}"


@dataclass(frozen=True)
class Graph:
    """Nodes and which of them are the results.  Raises :class:`BadGraph` when they do not fit.

    Operator sets are also passed as bit masks (bit i: node i): 5,000 nodes fit into 625 bytes, and
    a whole set is compared at once.  ``varying`` is the prime that stands for a size known at run
    time only (:mod:`nostall.fusion.graph.dynamic_size`).
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    varying: int | None = None

    def __post_init__(self) -> None:
        for place, node in enumerate(self.nodes):
            _check(node, place, self.nodes)
        for index in self.outputs:
            if not 0 <= index < len(self.nodes):
                raise BadGraph(
                    f"output %{index} is no node; there are {len(self.nodes)} nodes, counted "
                    "from 0; list nodes of this graph as outputs"
                )
        if self.varying is not None and not is_stand_in(self.varying):
            raise BadGraph(
                f"{self.varying} stands for a size known at run time only; that is an odd prime "
                "that divides no other size; take one from varying.stand_in"
            )

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def __str__(self) -> str:
        lines = [self.told(node.index) for node in self.nodes]
        return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in self.outputs)])

    def told(self, index: int) -> str:
        """A node as text; ``n`` is the size that varies."""
        return self.nodes[index].told(self.varying)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The input nodes, in the order in which a kernel or interpreter takes their values."""
        return tuple(node.index for node in self.nodes if node.kind == "input")

    @cached_property
    def operators(self) -> tuple[int, ...]:
        """The nodes that some kernel has to compute, in topological order."""
        return tuple(i for i in self._wanted if self.nodes[i].kind in COMPUTE)

    @cached_property
    def _wanted(self) -> tuple[int, ...]:
        """The operators that lead to an output or an opaque node, and those."""
        found = set(self.results)
        for node in reversed(self.nodes):
            if node.kind == "opaque" or (node.kind in COMPUTE and node.index in found):
                found.add(node.index)
                found.update(self.sources[node.index])
        kinds = (*COMPUTE, "opaque")
        return tuple(
            node.index for node in self.nodes if node.index in found and node.kind in kinds
        )

    @cached_property
    def key(self) -> str:
        """sha256 of operations, shapes, strides, dtypes, attributes and edges."""
        rows = [
            [n.op, n.inputs, n.shape, n.dtype, n.strides, [[k, repr(v)] for k, v in n.attributes]]
            for n in self.nodes
        ]
        given: list[object] = [rows, self.outputs]
        if self.varying is not None:
            given.append(self.varying)
        text = json.dumps(given, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Of every node the nodes that read it, views included, each once, ascending."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for index in dict.fromkeys(node.inputs):
                found[index].append(node.index)
        return tuple(map(tuple, found))

    def base(self, index: int) -> int:
        """The node whose memory a view shows; the node itself where it is no view."""
        while self.nodes[index].kind == "layout":
            index = self.nodes[index].inputs[0]
        return index

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Of every node the inputs, operators and opaque nodes it reads directly or by a view."""
        found = []
        for node in self.nodes:
            bases = dict.fromkeys(self.base(index) for index in node.inputs)
            found.append(tuple(i for i in bases if self.nodes[i].kind != "constant"))
        return tuple(found)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """Of every node the operators and opaque nodes that read it directly or by a view, without
        those that lead to nothing."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for reader in self._wanted:
            for index in self.sources[reader]:
                found[index].append(reader)
        return tuple(map(tuple, found))

    @cached_property
    def results(self) -> frozenset[int]:
        """Nodes that have to be in memory at the end: the outputs, or what they are views of."""
        return frozenset(self.base(index) for index in self.outputs)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """Of every node a mask of the operators and opaque nodes it depends on, without itself."""
        masks = [0] * len(self.nodes)
        for node in self.nodes:
            for index in self.sources[node.index]:
                own = 0 if self.nodes[index].kind == "input" else 1 << index
                masks[node.index] |= masks[index] | own
        return tuple(masks)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """Of every node a mask of the operators and opaque nodes that depend on it."""
        masks = [0] * len(self.nodes)
        for index in reversed(range(len(self.nodes))):
            for user in self.consumers[index]:
                masks[index] |= masks[user] | 1 << user
        return tuple(masks)

    def is_convex(self, operators: Iterable[int]) -> bool:
        """Whether no path leaves the set and comes back: as one kernel it would wait for itself."""
        chosen = above = below = 0
        for index in operators:
            chosen |= 1 << index
            above |= self.ancestors[index]
            below |= self.descendants[index]
        return not above & below & ~chosen

    def is_acyclic(self, groups: Sequence[Collection[int]]) -> bool:
        """Whether the disjoint groups of operators, each as one kernel, can run in some order."""
        return self.order(groups) is not None

    def order(self, groups: Sequence[Collection[int]]) -> tuple[int, ...] | None:
        """Positions of the groups in an order in which they can run; None where there is none.

        Operators outside the groups and opaque nodes run by themselves.  Of the groups that can run
        the one with the smallest operator goes first, so equal plans have equal orders.
        """
        held = {index: at for at, group in enumerate(groups) for index in group}
        alone = [
            node.index
            for node in self.nodes
            if node.index not in held and (node.kind in COMPUTE or node.kind == "opaque")
        ]
        members = [*groups, *([index] for index in alone)]
        held |= {index: len(groups) + at for at, index in enumerate(alone)}
        after = [
            {held[user] for index in group for user in self.consumers[index]} - {at}
            for at, group in enumerate(members)
        ]
        waits = Counter(at for later in after for at in later)
        ready = [(min(group), at) for at, group in enumerate(members) if group and not waits[at]]
        heapify(ready)
        ordered = []
        while ready:
            _, at = heappop(ready)
            ordered.append(at)
            for later in after[at]:
                waits[later] -= 1
                if not waits[later]:
                    heappush(ready, (min(members[later]), later))
        if len(ordered) < sum(1 for group in members if group):
            return None
        return tuple(at for at in ordered if at < len(groups))


def _told(size: int, varying: int | None) -> str:
    if not varies(size, varying):
        return str(size)
    assert varying is not None
    return "n" if size == varying else f"{size // varying}n"


def _check(node: Node, place: int, earlier: tuple[Node, ...]) -> None:
    row = OPERATIONS.get(node.op)
    if row is None:
        raise BadGraph(
            f"node %{place} has the unknown operation {node.op!r}; known are "
            f"{', '.join(OPERATIONS)}; make it 'opaque'"
        )
    if node.index != place:
        raise BadGraph(f"node {node} stands at place {place}; number nodes by their place from 0")
    if not all(0 <= index < place for index in node.inputs):
        raise BadGraph(
            f"node {node} reads a node that does not stand before it; sort nodes topologically"
        )
    if row.arity not in (None, len(node.inputs)):
        raise BadGraph(f"node {node} has {len(node.inputs)} operands; {node.op} takes {row.arity}")
    given = tuple(name for name, _ in node.attributes)
    if given != tuple(sorted(row.attributes)):
        raise BadGraph(
            f"node {node} has the attributes {given}; {node.op} has {tuple(sorted(row.attributes))}"
        )
    if len(node.strides) != len(node.shape):
        raise BadGraph(f"node {node} has strides {node.strides}; give one for each axis")
    if row.kind == "opaque":
        return
    if node.dtype not in DTYPE_BYTES:
        raise BadGraph(
            f"node {node} has dtype {node.dtype!r}; a kernel knows {', '.join(DTYPE_BYTES)}; "
            "make it 'opaque'"
        )
    if node.elements > MOST_ELEMENTS:
        raise BadGraph(
            f"node {node} has {node.elements} elements; at most {MOST_ELEMENTS} can be counted in "
            "32 bits; make it 'opaque'"
        )
    operands = [earlier[index].shape for index in node.inputs]
    fitting = result_shape(node.op, operands, dict(node.attributes), node.shape)
    if node.shape != fitting:
        sizes = ", ".join(map(str, operands)) or "nothing"
        raise BadGraph(
            f"node {node} has shape {node.shape}; {node.op} of {sizes} gives "
            f"{fitting or 'no shape'}"
        )
    if node.op in COMPARISONS and node.dtype != "bool":
        raise BadGraph(f"node {node} has dtype {node.dtype}; the result of {node.op} is bool")
