"""Operator graph: the input of fusion, with nodes in topological order.

A node is identified by its index. There are three groups of nodes:

- *Operators* (elementwise, reductions, small dots): fusion decides which kernel computes each.
- *Views and constants*: they cost nothing and belong to no kernel; each kernel that reads through
  one repeats it in its own code.
- *Opaque* nodes: PyTorch computes them outside of kernels, so no kernel contains them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from nostall.fusion.errors import BadGraph
from nostall.fusion.graph.dynamic_size import Size, factors, is_placeholder, resized, varies
from nostall.fusion.graph.operations import (
    COMPARISONS,
    COMPUTE,
    DTYPE_BYTES,
    OPERATIONS,
    Attribute,
    Kind,
)
from nostall.fusion.graph.shapes import Shape, result_shape

MAX_ELEMENTS = 2**31 - 1
"""Elements of the largest tensor: kernels count elements with signed 32-bit integers."""


@dataclass(frozen=True, slots=True)
class Node:
    """One value of a graph: an operation with its operands, shape, dtype and strides."""

    index: int
    """The node's position in its graph."""
    op: str
    """A key of :data:`~nostall.fusion.graph.operations.OPERATIONS`."""
    inputs: tuple[int, ...]
    """Indices of the operands, all smaller than ``index``."""
    shape: Shape
    dtype: str
    strides: Shape
    """Strides in elements; they hold if the value is an input or is written by a kernel."""
    attributes: tuple[tuple[str, Attribute], ...] = ()
    """(name, value) pairs sorted by name; the operation defines the names."""

    @property
    def kind(self) -> Kind:
        return OPERATIONS[self.op].kind

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of the value in memory; 0 for a dtype that kernels do not support."""
        return self.elements * DTYPE_BYTES.get(self.dtype, 0)

    def __getitem__(self, name: str) -> Attribute:
        for key, value in self.attributes:
            if key == name:
                return value
        raise KeyError(name)

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes that a reduction removes, or the order of axes of a permutation."""
        value = self["dims"]
        assert isinstance(value, tuple)
        return value

    @property
    def keepdim(self) -> bool:
        return bool(self["keepdim"])

    @property
    def counts(self) -> tuple[int, ...]:
        """Its number of elements; and of its memory, up to the end of each axis, if it is more."""
        extents = (size * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.elements, *(each for each in extents if each and self.elements % each)

    def resized(self, varying: int | None, size: Size | None) -> Node:
        """The node with its shape and strides at the run-time size ``size``.

        ``varying`` is that of the graph; if either is None, nothing changes.
        """
        if varying is None or size is None:
            return self
        shape, strides = (
            tuple(resized(number, varying, size) for number in numbers)
            for numbers in (self.shape, self.strides)
        )
        return replace(self, shape=shape, strides=strides)

    def __str__(self) -> str:
        return self.describe()

    def describe(self, varying: int | None = None) -> str:
        """The node as text: ``%3 = add(%1, %2) float32 4nx8``, where ``n`` is the dynamic size
        (``n0``, ``n1``, … if there are several)."""
        arguments = [f"%{i}" for i in self.inputs] + [f"{k}={v}" for k, v in self.attributes]
        sizes = "x".join(_size_text(size, varying) for size in self.shape) or "scalar"
        return f"%{self.index} = {self.op}({', '.join(arguments)}) {self.dtype} {sizes}"


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order with the outputs. Raises :class:`BadGraph` if they are invalid.

    Sets of operators are also passed as bit masks (bit i stands for node i): a set of 5,000 nodes
    takes 625 bytes, and comparing two sets is one integer operation.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    """Indices of the nodes whose values the graph returns, in order."""
    varying: int | None = None
    """Product of the primes that stand for dynamic sizes
    (:mod:`nostall.fusion.graph.dynamic_size`), if there are any."""
    compared: tuple[tuple[int, ...], ...] = ()
    """Groups of outputs that an operator behind this graph compares with each other
    (:mod:`nostall.fusion.graph.decisions`)."""

    def __post_init__(self) -> None:
        for position, node in enumerate(self.nodes):
            _check(node, position, self.nodes)
        for index in self.outputs:
            if not 0 <= index < len(self.nodes):
                raise BadGraph(
                    f"output %{index} is no node; the graph has {len(self.nodes)} nodes, counted "
                    "from 0; use indices of its nodes as outputs"
                )
        if self.varying is not None and not is_placeholder(self.varying):
            raise BadGraph(
                f"the placeholder for dynamic sizes is {self.varying}; allowed is a product of "
                "different odd primes that divide no other size; take them from "
                "dynamic_size.placeholder_prime"
            )

    def __hash__(self) -> int:
        return hash(self.key)  # computed once: caches look graphs up again and again

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, index: int) -> Node:
        return self.nodes[index]

    def __str__(self) -> str:
        lines = [self.describe(node.index) for node in self.nodes]
        return "\n".join([*lines, "return " + ", ".join(f"%{i}" for i in self.outputs)])

    def describe(self, index: int) -> str:
        """A node of the graph as text; ``n`` is the dynamic size."""
        return self.nodes[index].describe(self.varying)

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The input nodes, in the order in which kernels and interpreters take their values."""
        return tuple(node.index for node in self.nodes if node.kind == "input")

    @cached_property
    def operators(self) -> tuple[int, ...]:
        """The nodes that kernels have to compute, in topological order (dead ones excluded)."""
        return tuple(i for i in self._live if self.nodes[i].kind in COMPUTE)

    @cached_property
    def _live(self) -> tuple[int, ...]:
        """The opaque nodes, and the operators that an output or an opaque node depends on."""
        live = set(self.results)
        for node in reversed(self.nodes):
            if node.kind == "opaque" or (node.kind in COMPUTE and node.index in live):
                live.add(node.index)
                live.update(self.sources[node.index])
        kinds = (*COMPUTE, "opaque")
        return tuple(node.index for node in self.nodes if node.index in live and node.kind in kinds)

    @cached_property
    def key(self) -> str:
        """SHA-256 (hex) of operations, shapes, strides, dtypes, attributes, edges and outputs."""
        rows = [
            [n.op, n.inputs, n.shape, n.dtype, n.strides, [[k, repr(v)] for k, v in n.attributes]]
            for n in self.nodes
        ]
        content: list[object] = [rows, self.outputs]
        if self.varying is not None:
            content.append(self.varying)
        if self.compared:
            content.append(["compared", self.compared])
        text = json.dumps(content, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """For each node: the nodes that have it as an operand, views included, ascending."""
        users: list[list[int]] = [[] for _ in self.nodes]
        for node in self.nodes:
            for index in dict.fromkeys(node.inputs):
                users[index].append(node.index)
        return tuple(map(tuple, users))

    def base(self, index: int) -> int:
        """The node whose memory a view shares; the node itself if it is no view."""
        while self.nodes[index].kind == "layout":
            index = self.nodes[index].inputs[0]
        return index

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each node: the inputs, operators and opaque nodes it reads, directly or by a view."""
        sources = []
        for node in self.nodes:
            bases = dict.fromkeys(self.base(index) for index in node.inputs)
            sources.append(tuple(i for i in bases if self.nodes[i].kind != "constant"))
        return tuple(sources)

    @cached_property
    def consumers(self) -> tuple[tuple[int, ...], ...]:
        """For each node: the operators and opaque nodes that read it, directly or by a view.

        Operators that no output and no opaque node depends on are left out.
        """
        consumers: list[list[int]] = [[] for _ in self.nodes]
        for reader in self._live:
            for index in self.sources[reader]:
                consumers[index].append(reader)
        return tuple(map(tuple, consumers))

    @cached_property
    def results(self) -> frozenset[int]:
        """Nodes that must be in memory at the end: the outputs, with views replaced by bases."""
        return frozenset(self.base(index) for index in self.outputs)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each node: a mask of the operators and opaque nodes it depends on, without itself."""
        masks = [0] * len(self.nodes)
        for node in self.nodes:
            for index in self.sources[node.index]:
                own = 0 if self.nodes[index].kind == "input" else 1 << index
                masks[node.index] |= masks[index] | own
        return tuple(masks)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each node: a mask of the operators and opaque nodes that depend on it."""
        masks = [0] * len(self.nodes)
        for index in reversed(range(len(self.nodes))):
            for user in self.consumers[index]:
                masks[index] |= masks[user] | 1 << user
        return tuple(masks)

    @cached_property
    def opaque(self) -> int:
        """A mask of the opaque nodes."""
        return sum(1 << node.index for node in self.nodes if node.kind == "opaque")

    def is_acyclic(self, groups: Sequence[Collection[int]]) -> bool:
        """Whether disjoint groups of operators, each as one kernel, can run in some order."""
        return self.execution_order(groups) is not None

    def execution_order(self, groups: Sequence[Collection[int]]) -> tuple[int, ...] | None:
        """Positions in ``groups`` in an order in which the groups can run; None if there is none.

        Opaque nodes and operators outside the groups run on their own. If several groups are ready,
        the one with the smallest operator runs first, so equal partitions have equal orders.
        """
        step_of = {index: step for step, group in enumerate(groups) for index in group}
        single = [
            node.index
            for node in self.nodes
            if node.index not in step_of and (node.kind in COMPUTE or node.kind == "opaque")
        ]
        steps = [*groups, *([index] for index in single)]
        step_of |= {index: len(groups) + at for at, index in enumerate(single)}
        successors = [
            {step_of[user] for index in group for user in self.consumers[index]} - {step}
            for step, group in enumerate(steps)
        ]
        pending = Counter(step for later in successors for step in later)
        ready = [(min(group), at) for at, group in enumerate(steps) if group and not pending[at]]
        heapify(ready)
        order = []
        while ready:
            _, step = heappop(ready)
            order.append(step)
            for later in successors[step]:
                pending[later] -= 1
                if not pending[later]:
                    heappush(ready, (min(steps[later]), later))
        if len(order) < sum(1 for group in steps if group):
            return None
        return tuple(step for step in order if step < len(groups))


def _size_text(size: int, varying: int | None) -> str:
    if not varies(size, varying):
        return str(size)
    assert varying is not None
    constant, powers = factors(size, varying)
    names = [f"n{at}" if len(powers) > 1 else "n" for at, n in enumerate(powers) for _ in range(n)]
    return f"{constant if constant > 1 else ''}{'*'.join(names)}"


def _check(node: Node, position: int, nodes: tuple[Node, ...]) -> None:
    """Raise :class:`BadGraph` if a node contradicts its position, operation or operands."""
    row = OPERATIONS.get(node.op)
    if row is None:
        raise BadGraph(
            f"node %{position} has the unknown operation {node.op!r}; known are "
            f"{', '.join(OPERATIONS)}; make it 'opaque'"
        )
    if node.index != position:
        raise BadGraph(f"node {node} is at position {position}; number nodes by position from 0")
    if not all(0 <= index < position for index in node.inputs):
        raise BadGraph(f"node {node} reads a node that is not before it; sort nodes topologically")
    if row.arity not in (None, len(node.inputs)):
        raise BadGraph(f"node {node} has {len(node.inputs)} operands; {node.op} takes {row.arity}")
    names = tuple(name for name, _ in node.attributes)
    if names != tuple(sorted(row.attributes)):
        raise BadGraph(
            f"node {node} has the attributes {names}; {node.op} has {tuple(sorted(row.attributes))}"
        )
    if len(node.strides) != len(node.shape):
        raise BadGraph(f"node {node} has strides {node.strides}; give one stride for each axis")
    if row.kind == "opaque":
        return
    if node.dtype not in DTYPE_BYTES:
        raise BadGraph(
            f"node {node} has dtype {node.dtype!r}; kernels support {', '.join(DTYPE_BYTES)}; "
            "make it 'opaque'"
        )
    if node.elements > MAX_ELEMENTS:
        raise BadGraph(
            f"node {node} has {node.elements} elements; kernels count in 32 bits, so at most "
            f"{MAX_ELEMENTS} are allowed; make it 'opaque'"
        )
    operands = [nodes[index].shape for index in node.inputs]
    expected = result_shape(node.op, operands, dict(node.attributes), node.shape)
    if node.shape != expected:
        sizes = ", ".join(map(str, operands)) or "nothing"
        raise BadGraph(
            f"node {node} has shape {node.shape}; {node.op} of {sizes} gives "
            f"{expected or 'no shape'}"
        )
    if node.op in COMPARISONS and node.dtype != "bool":
        raise BadGraph(f"node {node} has dtype {node.dtype}; the result of {node.op} is bool")
