"""What every operator of a graph does: bytes, instructions, and how its rows meet its operands'.

Two values *meet* in R rows when, cut into R equal pieces in row-major order, piece r of one needs
nothing but piece r of the other.  A kernel whose operators all meet in R rows can give each row to
one block; that is what lets it use a reduction it has just computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from nostall.fusion.graph.graph import Graph, Node
from nostall.fusion.graph.operations import DTYPE_BYTES
from nostall.fusion.graph.shapes import Shape

FEW_ROWS = 64
"""A reduction to fewer results than this is spread over blocks."""

_INSTRUCTIONS = {
    "div": 9,
    "pow": 26,
    "remainder": 14,
    "fmod": 14,
    "exp": 4,
    "exp2": 2,
    "expm1": 14,
    "log": 4,
    "log2": 2,
    "log1p": 14,
    "sqrt": 6,
    "rsqrt": 3,
    "reciprocal": 6,
    "tanh": 12,
    "sigmoid": 10,
    "sin": 20,
    "cos": 20,
    "erf": 18,
}
"""Instructions for each element of a heavy operator in fp32, assumed from the code that libdevice
and the special function unit need; light operators take 1."""
_RANDOM: dict[object, float] = {1: 52.0, 4: 13.0, 8: 6.0}
"""Of a random number by its ``words``, four to a counter or one: counted in code for sm_90."""
_TENSOR_CORE_PRODUCTS = 32.0
"""Products for each lane of an m16n8k16 instruction (64), half of them for what moves operands,
assumed."""


@dataclass(frozen=True, slots=True)
class Edge:
    """An operator reads ``source``.

    ``rows``: both meet in R rows for every divisor R of it; 0: in any number.  ``touched``: bytes
    that are read.  ``view`` tells apart different parts of one source.
    ``stretch``: how often each element is used.
    """

    source: int
    rows: int
    touched: int
    view: int
    stretch: float


class Work:
    """All that the evaluators ask of a graph, computed once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.edges: dict[int, tuple[Edge, ...]] = {}
        self.iterated: dict[int, int] = {}
        self.instructions: dict[int, float] = {}
        self.across: dict[int, tuple[int, int] | None] = {}
        """Of sets that were asked for, rows and columns along other axes than the leading ones."""
        for index in graph.operators:
            node = graph[index]
            self.iterated[index] = self._iterations(node)
            self.instructions[index] = self._count(node, self.iterated[index])
            self.edges[index] = tuple(self._edges(node))

    @cached_property
    def reductions(self) -> frozenset[int]:
        """Reductions and dots: what consumers in another row cannot just compute again."""
        kinds = ("reduce", "dot")
        return frozenset(i for i in self.graph.operators if self.graph[i].kind in kinds)

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """Of every node its size in memory."""
        return tuple(node.bytes for node in self.graph)

    @cached_property
    def crossing(self) -> frozenset[int]:
        """The large reductions whose pieces do not lie together: as a kernel's end, several blocks
        share each result, and a second stage adds up."""
        return frozenset(
            index
            for index in self.graph.operators
            if self.graph[index].kind == "reduce"
            and 0 < math.gcd(*(edge.rows for edge in self.edges[index])) < FEW_ROWS
            and self.iterated[index] > 2**16
        )

    def _iterations(self, node: Node) -> int:
        """Elements of the largest tile that the operator walks over."""
        if node.kind in ("reduce", "dot"):
            return max(node.elements, *(self.graph[i].elements for i in node.inputs))
        return node.elements

    def _count(self, node: Node, iterated: int) -> float:
        if node.kind == "dot":
            products = node.elements * self.graph[node.inputs[0]].shape[-1]
            return products / (1.0 if node.dtype == "float32" else _TENSOR_CORE_PRODUCTS)
        if node.op == "random":
            return iterated * _RANDOM[node["words"]]
        return float(iterated * _INSTRUCTIONS.get(node.op, 1))

    def _edges(self, node: Node) -> list[Edge]:
        found = []
        for operand in dict.fromkeys(node.inputs):
            base = self.graph.base(operand)
            source = self.graph[base]
            if source.kind == "constant":
                continue
            rows = math.gcd(self._entering(node, operand), self._through(operand, base))
            size = DTYPE_BYTES.get(source.dtype, 0)
            touched = min(self.graph[operand].elements, source.elements) * size
            stretch = self.iterated[node.index] / max(1, source.elements)
            found.append(Edge(base, rows, touched, operand, stretch))
        return found

    def _entering(self, node: Node, operand: int) -> int:
        """Rows in which an operator meets its operand."""
        shape = self.graph[operand].shape
        if node.kind == "reduce":
            return _leading(shape, lambda axis: axis not in node.dims or shape[axis] == 1)
        if node.kind == "dot":
            return math.prod(shape[:-2])
        return _stretched(shape, node.shape)

    def _through(self, operand: int, base: int) -> int:
        """Rows in which a view meets the value that it shows."""
        rows = 0
        while operand != base:
            node = self.graph[operand]
            (inner,) = node.inputs
            shape = self.graph[inner].shape
            if node.op == "expand":
                rows = math.gcd(rows, _stretched(shape, node.shape))
            elif node.op == "permute":
                kept = [axis for axis in node.dims if shape[axis] != 1]
                moved = next((i for i, a in enumerate(kept) if a != sorted(kept)[i]), len(kept))
                if moved < len(kept):
                    rows = math.gcd(rows, math.prod(shape[axis] for axis in kept[:moved]))
            elif node.op == "slice":
                cut = node["dim"]
                assert isinstance(cut, int)
                rows = math.gcd(rows, math.prod(shape[:cut]))
            operand = inner
        return rows


def _leading(shape: Shape, holds: Callable[[int], bool]) -> int:
    """Product of the leading axes for which ``holds``."""
    rows = 1
    for axis, size in enumerate(shape):
        if not holds(axis):
            break
        rows *= size
    return rows


def _stretched(shape: Shape, wide: Shape) -> int:
    """Rows in which a value meets what it is broadcast to; 0 where nothing is stretched."""
    padded = (1,) * (len(wide) - len(shape)) + shape
    if padded == wide:
        return 0
    return _leading(wide, lambda axis: padded[axis] == wide[axis])
