"""Peephole rewrite of 1 + tanh(x) and 1 + erf(x), which both forms of GELU have, to one function.

Both sums are 2 / (1 + exp(-y)): with y = 2x for tanh (exact), and with a fitted odd y(x) for erf.
So the function needs no case distinction near 0 and no clamp.  If the sum is nearly 0, the tanh
form keeps the digits that an addition would cancel; the erf form is about as accurate as an
addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nostall.fusion.codegen.expressions.templates import Value, as_tensor, compute_dtype, expression
from nostall.fusion.graph.graph import Graph, Node

_ONE_PLUS_TEMPLATES = {"tanh": "_tanh_plus_1({})", "erf": "_erf_plus_1({})"}


def is_deferred(graph: Graph, index: int) -> bool:
    """Whether a node is tanh or erf and all its users add 1.

    If another user needs the function itself (tanh's derivative needs its square), the kernel
    computes it anyway, and adding 1 to it is cheapest.
    """
    users = graph.users[index]
    has_rewrite = (
        graph[index].op in _ONE_PLUS_TEMPLATES and index not in graph.outputs and bool(users)
    )
    return has_rewrite and all(_adds_one(graph, user) for user in users)


def _adds_one(graph: Graph, index: int) -> bool:
    node = graph[index]
    ones = [i for i in node.inputs if graph[i].op == "constant" and graph[i]["value"] == 1]
    return node.op == "add" and compute_dtype(node.dtype) == "float32" and len(ones) == 1


def deferred_value(node: Node, operands: Sequence[Value]) -> Value:
    """The value of a deferred node: its own text, and the text of 1 + the value."""
    text = _ONE_PLUS_TEMPLATES[node.op].format(as_tensor(operands[0], "float32"))
    return replace(expression(node, operands), plus_one=text)


def add_one(node: Node, operands: Sequence[Value]) -> Value | None:
    """The sum of 1 and a deferred value; None for other operators."""
    if node.op == "add":
        for value, constant in (operands, operands[::-1]):
            if value.plus_one and constant.number == 1:
                return Value(value.plus_one, "float32")
    return None
