"""1 + tanh(x) and 1 + erf(x), as both forms of GELU have them, each as one function.

Both are 2 / (1 + exp(-y)): exactly, with y = 2 x, of tanh, and with an odd y(x) of erf.  So there
are no cases near and far from 0, and nothing is clamped.  Where the sum is nearly 0, that of tanh
keeps the digits that an addition loses, that of erf has about those of an addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nostall.fusion.codegen.expressions.templates import Value, as_tensor, compute_dtype, expression
from nostall.fusion.graph.graph import Graph, Node

_ONE_PLUS_TEMPLATES = {"tanh": "_tanh_plus_1({})", "erf": "_erf_plus_1({})"}


def is_deferred(graph: Graph, index: int) -> bool:
    """Whether a node is tanh or erf and everything that reads it adds 1.

    Where anything else reads it (tanh's derivative has its square) it is there anyway, and adding
    1 to it is the shortest.
    """
    readers = graph.users[index]
    wanted = graph[index].op in _ONE_PLUS_TEMPLATES and index not in graph.outputs and bool(readers)
    return wanted and all(_adds_one(graph, reader) for reader in readers)


def _adds_one(graph: Graph, index: int) -> bool:
    node = graph[index]
    ones = [i for i in node.inputs if graph[i].op == "constant" and graph[i]["value"] == 1]
    return node.op == "add" and compute_dtype(node.dtype) == "float32" and len(ones) == 1


def deferred_value(node: Node, operands: Sequence[Value]) -> Value:
    """What such a node is for those that read it: no name, but what to write in either case."""
    text = _ONE_PLUS_TEMPLATES[node.op].format(as_tensor(operands[0], "float32"))
    return replace(expression(node, operands), plus_one=text)


def add_one(node: Node, operands: Sequence[Value]) -> Value | None:
    """The sum of 1 and a value that was left to its readers in this loop; None of other values."""
    if node.op == "add":
        for value, one in (operands, operands[::-1]):
            if value.plus_one and one.number == 1:
                return Value(value.plus_one, "float32")
    return None
