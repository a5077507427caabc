"""Work of each operator of a graph: bytes, instructions, and row alignment with its operands.

Two values are *aligned in R rows* if, with both cut into R equal pieces in row-major order, piece r
of one depends only on piece r of the other. If all operators of a kernel are aligned in R rows, the
kernel can compute each row in one block, and so it can use the result of a reduction that it has
just computed.
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
"""A large reduction to fewer aligned rows than this is spread over several blocks."""

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
"""Instructions per element of a heavy operator in fp32; light operators take 1. Assumed, from the
code of libdevice and the special function unit."""
_RANDOM: dict[object, float] = {1: 52.0, 4: 13.0, 8: 6.0}
"""Instructions per random number by its ``words`` (numbers made from each counter value); counted
in code for sm_90."""
_TENSOR_CORE_PRODUCTS = 32.0
"""Products per lane and instruction on tensor cores. Assumed: half of the 64 of m16n8k16, because
as many instructions move operands."""


@dataclass(frozen=True, slots=True)
class Edge:
    """One operand of an operator: which bytes it reads and how its rows are aligned with it."""

    source: int
    """The input, operator or opaque node that the operator reads."""
    rows: int
    """The operator and the source are aligned in R rows for each divisor R of this; 0: any R."""
    read_bytes: int
    """Bytes of the source that the operator reads."""
    view: int
    """The operand, which may be a view of the source; tells apart different parts of the source."""
    reuse: float
    """Number of times that the operator uses each element of the source."""


class GraphWork:
    """Work of all operators of a graph, computed once for the evaluators."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.edges: dict[int, tuple[Edge, ...]] = {}
        """For each operator: its operands, without constants."""
        self.iterations: dict[int, int] = {}
        """For each operator: elements of the largest tile that it loops over."""
        self.instructions: dict[int, float] = {}
        """For each operator: instructions of all lanes."""
        self.outer_rows: dict[int, tuple[int, int] | None] = {}
        """Cache of :func:`~nostall.fusion.evaluate.legality.row_layout`: (rows, columns) of a
        mask of operators, if rows are not the leading axes."""
        for index in graph.operators:
            node = graph[index]
            self.iterations[index] = self._iterations(node)
            self.instructions[index] = self._instruction_count(node, self.iterations[index])
            self.edges[index] = tuple(self._edges(node))

    @cached_property
    def reductions(self) -> frozenset[int]:
        """Reductions and dots, which consumers in another row cannot simply recompute."""
        kinds = ("reduce", "dot")
        return frozenset(i for i in self.graph.operators if self.graph[i].kind in kinds)

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """For each node: its bytes in memory."""
        return tuple(node.bytes for node in self.graph)

    @cached_property
    def cross_block_reductions(self) -> frozenset[int]:
        """Large reductions with few aligned rows, which several blocks compute in two stages.

        Such a reduction ends a kernel. Each block computes partial results, and a second stage adds
        them up.
        """
        return frozenset(
            index
            for index in self.graph.operators
            if self.graph[index].kind == "reduce"
            and 0 < math.gcd(*(edge.rows for edge in self.edges[index])) < FEW_ROWS
            and self.iterations[index] > 2**16
        )

    def _iterations(self, node: Node) -> int:
        if node.kind in ("reduce", "dot"):
            return max(node.elements, *(self.graph[i].elements for i in node.inputs))
        return node.elements

    def _instruction_count(self, node: Node, iterations: int) -> float:
        if node.kind == "dot":
            products = node.elements * self.graph[node.inputs[0]].shape[-1]
            return products / (1.0 if node.dtype == "float32" else _TENSOR_CORE_PRODUCTS)
        if node.op == "random":
            return iterations * _RANDOM[node["words"]]
        return float(iterations * _INSTRUCTIONS.get(node.op, 1))

    def _edges(self, node: Node) -> list[Edge]:
        edges = []
        for operand in dict.fromkeys(node.inputs):
            base = self.graph.base(operand)
            source = self.graph[base]
            if source.kind == "constant":
                continue
            rows = math.gcd(self._operand_rows(node, operand), self._view_rows(operand, base))
            size = DTYPE_BYTES.get(source.dtype, 0)
            read_bytes = min(self.graph[operand].elements, source.elements) * size
            reuse = self.iterations[node.index] / max(1, source.elements)
            edges.append(Edge(base, rows, read_bytes, operand, reuse))
        return edges

    def _operand_rows(self, node: Node, operand: int) -> int:
        """Rows in which an operator is aligned with its operand; 0 for any number."""
        shape = self.graph[operand].shape
        if node.kind == "reduce":
            return _leading_product(shape, lambda axis: axis not in node.dims or shape[axis] == 1)
        if node.kind == "dot":
            return math.prod(shape[:-2])
        return _broadcast_rows(shape, node.shape)

    def _view_rows(self, operand: int, base: int) -> int:
        """The largest number of rows into which a chain of views and its base can be cut alike.

        Any divisor of it works, too. 0 if every number of rows works.
        """
        rows = 0
        while operand != base:
            node = self.graph[operand]
            (inner,) = node.inputs
            shape = self.graph[inner].shape
            if node.op == "expand":
                rows = math.gcd(rows, _broadcast_rows(shape, node.shape))
            elif node.op == "permute":
                order = [axis for axis in node.dims if shape[axis] != 1]
                moved = next((i for i, a in enumerate(order) if a != sorted(order)[i]), len(order))
                if moved < len(order):
                    rows = math.gcd(rows, math.prod(shape[axis] for axis in order[:moved]))
            elif node.op == "slice":
                dim = node["dim"]
                assert isinstance(dim, int)
                rows = math.gcd(rows, math.prod(shape[:dim]))
            operand = inner
        return rows


def _leading_product(shape: Shape, holds: Callable[[int], bool]) -> int:
    """Product of the sizes of the leading axes, up to the first axis for which not ``holds``."""
    product = 1
    for axis, size in enumerate(shape):
        if not holds(axis):
            break
        product *= size
    return product


def _broadcast_rows(shape: Shape, wide: Shape) -> int:
    """Rows in which a value is aligned with its broadcast to ``wide``; 0 for equal shapes."""
    padded = (1,) * (len(wide) - len(shape)) + shape
    if padded == wide:
        return 0
    return _leading_product(wide, lambda axis: padded[axis] == wide[axis])
